// Shapes that a layer is tested at, shared by the tests of its CPU loops and of its CUDA kernels (test/simt).
#pragma once

#include <cstdint>
#include <vector>

#include "layers/rmsnorm.h"

struct RmsNormCase {
  int64_t rows, C;
  NormKind kind;
};

// One row, one column, tails of every vector width, more rows than partial sums on either device; rows that a block
// shares: with a tail, odd, and one too long for shared memory.
inline constexpr RmsNormCase kRmsNormCases[] = {
    {1, 1, NormKind::Plain},        {3, 7, NormKind::LateCast},   {5, 64, NormKind::OnePlus},
    {33, 100, NormKind::Plain},     {130, 33, NormKind::OnePlus}, {1100, 24, NormKind::LateCast},
    {4200, 3, NormKind::Plain},     {3, 2056, NormKind::OnePlus}, {2, 1031, NormKind::LateCast},
    {530, 1028, NormKind::OnePlus}, {2, 24584, NormKind::Plain},
};

struct AttentionCase {
  std::vector<int64_t> documents;  ///< lengths
  int64_t NH, NKV, HD;
  int64_t window = 0;
  double softcap = 0;
  double q_stddev = 1;
};

// Documents of one token, of two, odd, of several tiles (16, 32 and 64 tokens), many in a tile; MHA, GQA, MQA; windows
// of one token, shorter and longer than a tile; softcap; widths with a tail in a 128-bit pack, an odd one, and one for
// each width that the CUDA kernels pad to. At most 200 tokens, never a multiple of a tile.
inline const AttentionCase kAttentionCases[] = {
    {{1}, 1, 1, 8},
    {{1, 2, 1, 3}, 3, 1, 10},
    {{63, 64, 66}, 2, 2, 8},
    {{135}, 2, 1, 64},
    {{5, 4, 3, 2, 1, 7, 6, 5, 9, 8, 3, 2, 30}, 4, 2, 16},
    {{110, 23}, 2, 1, 64, 7},
    {{140, 19}, 3, 1, 10, 100},
    {{70, 7}, 2, 2, 80, 0, 3.0},
    {{5, 90}, 1, 1, 24, 1},
    {{77}, 2, 1, 17, 33, 2.0},
    {{66, 33}, 2, 1, 128, 0, 5.0},
    {{70, 3}, 1, 1, 128, 40},
    {{41, 27}, 1, 1, 256, 30},
};
