// What ranks send each other: calls, and the bytes that leave this rank. Counted by those who send.
#pragma once

#include <cstdint>

struct Traffic {
  struct Kind {
    int64_t calls = 0, bytes = 0;

    void add(int64_t sent_bytes) { calls++, bytes += sent_bytes; }
    Kind operator-(const Kind& earlier) const { return {calls - earlier.calls, bytes - earlier.bytes}; }
    bool operator==(const Kind&) const = default;
  };
  Kind gathers;       ///< weights of a unit, all-gather
  Kind reduces;       ///< gradients of a unit, reduce-scatter
  Kind replica_sums;  ///< gradients of a shard over the replicas, all-reduce
  Kind exchanges;     ///< attention under Ulysses, all-to-all

  Traffic operator-(const Traffic& earlier) const {
    return {gathers - earlier.gathers, reduces - earlier.reduces, replica_sums - earlier.replica_sums,
            exchanges - earlier.exchanges};
  }
  bool operator==(const Traffic&) const = default;
};
