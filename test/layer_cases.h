// Shapes that a layer is tested at, shared by the tests of its CPU loops and of its CUDA kernels (test/simt).
#pragma once

#include <cstdint>

#include "layers/loss.h"
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

struct LinearCase {
  int64_t rows, K, N;
};

// Single elements, tails of every tile and vector width, sums longer than one block of K.
inline constexpr LinearCase kLinearCases[] = {
    {1, 1, 1}, {1, 64, 7}, {5, 3, 17}, {33, 100, 40}, {130, 37, 65}, {7, 1100, 50}, {97, 384, 129},
};

struct LossCase {
  int64_t T, C, V;
  LossShape shape;
  double masked = 0.5;  ///< share of rows without a target
};

// One row, one word; tiles that divide, do not divide, and are larger than T; a vocabulary of several blocks.
inline constexpr LossCase kLossCases[] = {
    {1, 3, 5, {0, 1}, 0.0}, {7, 4, 1, {0, 2}},    {12, 5, 9, {0, 4}},     {13, 6, 17, {3.0, 4}, 0.0},
    {9, 8, 33, {2.0, 100}}, {6, 3, 2500, {0, 2}}, {5, 3, 1025, {5.0, 3}},
};
