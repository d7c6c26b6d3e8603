// Arena: one allocation that holds every activation and buffer of a run. The function that places tensors runs twice:
// on an empty arena it measures (`--plan`), on the real one it places, so that sizes and pointers cannot drift.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "layers/core/device.h"
#include "layers/core/tensor.h"

class Arena {
 public:
  static constexpr size_t kAlignment = 256;

  struct Entry {
    std::string section;  ///< what it is for and how long it lives, "block activations"
    std::string name;
    Shape shape;
    DType dtype;
    size_t size_bytes;  ///< with padding
  };

  /// Measures only: tensors have no memory.
  Arena() = default;
  /// One allocation of `capacity_bytes` on `device`, which must outlive the arena.
  Arena(Device& device, size_t capacity_bytes);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  bool measures_only() const { return device_ == nullptr; }

  /// The heading under which the following tensors are listed.
  void begin_section(std::string section) { section_ = std::move(section); }

  /// The next `shape.numel()` elements. An Error names tensor, section and sizes when the arena is full.
  Tensor place(DType dtype, Shape shape, std::string name);

  /// Stack discipline for buffers that are never alive together: rewind(mark()) gives back what was placed between.
  size_t mark() const { return used_bytes_; }
  void rewind(size_t mark) { used_bytes_ = mark; }

  size_t used_bytes() const { return used_bytes_; }
  size_t peak_bytes() const { return peak_bytes_; }
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  Device* device_ = nullptr;
  char* base_ = nullptr;
  size_t capacity_bytes_ = 0;
  size_t used_bytes_ = 0;
  size_t peak_bytes_ = 0;
  std::string section_ = "buffers";
  std::vector<Entry> entries_;
  std::deque<std::string> names_;  // stable addresses for Tensor::name
};
