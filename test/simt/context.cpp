#include "test/simt/context.h"

#include <cstdint>

#include "layers/core/check.h"

// Present only in a program that is linked with ASan; this file itself is never instrumented.
extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom_old, size_t* size_old);
[[gnu::weak]] void __asan_unpoison_memory_region(void const volatile* data, size_t size_bytes);
}

namespace {

// The two ends of the switch in progress, and what a fresh context is to run. One OS thread switches.
Context* leaving = nullptr;
Context* arriving = nullptr;
void (*fresh_entry)() = nullptr;

void announce(Context& from, Context& to, bool ends) {
  leaving = &from;
  arriving = &to;
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.stack, to.stack_size);
  }
}

void arrive() {
  // The bounds of the stack that was left are how ASan tells us where the program's own stack is.
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(arriving->fake_stack, &leaving->stack, &leaving->stack_size);
  }
}

void begin() {
  arrive();
  fresh_entry();
  fail("a context's entry returned");
}

}  // namespace

#ifdef __x86_64__

// simt_switch(void** save, void* to): pushes the callee-saved registers, swaps stacks, pops them.
asm(R"(
.text
.globl simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");
extern "C" void simt_switch(void** save, void* to);

void context_create(Context& context, void* stack, size_t stack_size, size_t skew_bytes, void (*entry)()) {
  constexpr size_t kSavedRegisters = 6;
  fresh_entry = entry;
  const uintptr_t end = reinterpret_cast<uintptr_t>(stack) + stack_size - skew_bytes;
  void** top = reinterpret_cast<void**>(end & ~uintptr_t{15});
  *--top = nullptr;  // where `begin` would return to: keeps the stack aligned as after a call
  *--top = reinterpret_cast<void*>(&begin);
  context.stack_pointer = top - kSavedRegisters;
  context.stack = stack;
  context.stack_size = stack_size;
  context.fake_stack = nullptr;
}

void context_switch(Context& from, Context& to, bool ends) {
  announce(from, to, ends);
  simt_switch(&from.stack_pointer, to.stack_pointer);
  arrive();
}

#else

void context_create(Context& context, void* stack, size_t stack_size, size_t skew_bytes, void (*entry)()) {
  fresh_entry = entry;
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack;
  context.registers.uc_stack.ss_size = stack_size - skew_bytes;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, begin, 0);
  context.stack = stack;
  context.stack_size = stack_size;
  context.fake_stack = nullptr;
}

void context_switch(Context& from, Context& to, bool ends) {
  announce(from, to, ends);
  swapcontext(&from.registers, &to.registers);
  arrive();
}

#endif

void context_clear_stack(void* stack, size_t stack_size) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(stack, stack_size);
}
