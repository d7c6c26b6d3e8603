// Shapes that a layer is tested at, shared by the tests of its CPU loops and of its CUDA kernels (test/simt).
#pragma once

#include <cstdint>

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

struct GatedActCase {
  int64_t T, F;
};

// One element, tails of every vector width, rows of one block and of several with a tail, several threads on the CPU.
inline constexpr GatedActCase kGatedActCases[] = {{1, 1}, {3, 7}, {5, 33}, {20, 100}, {2, 2056}, {50, 1001}};
