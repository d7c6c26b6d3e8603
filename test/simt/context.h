// Switching between flows of control that each have a stack: 25 ns on x86-64; by ucontext elsewhere, 750 ns.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

struct Context {
#ifdef __x86_64__
  void* stack_pointer = nullptr;  ///< the callee-saved registers lie on the stack
#else
  ucontext_t registers;
#endif
  // what ASan has to be told
  const void* stack = nullptr;
  size_t stack_size = 0;
  void* fake_stack = nullptr;
};

/// `context` will run `entry` from its start. `entry` never returns: it ends with a switch that says so.
/// `skew_bytes` moves the start down: stacks at equal distances would share cache sets.
void context_create(Context& context, void* stack, size_t stack_size, size_t skew_bytes, void (*entry)());

/// Suspends the running flow in `from` and goes on in `to`. `ends`: `from` will never be resumed.
void context_switch(Context& from, Context& to, bool ends = false);

/// Stacks of flows that were abandoned rather than ended: ASan forgets their frames.
void context_clear_stack(void* stack, size_t stack_size);
