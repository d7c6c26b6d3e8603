// Shapes that a layer is tested at, shared by the tests of its CPU loops and of its CUDA kernels (test/simt).
#pragma once

#include <cstdint>
#include <vector>

#include "layers/loss.h"
#include "layers/mla.h"
#include "layers/moe.h"
#include "layers/qk_norm.h"
#include "layers/rmsnorm.h"
#include "layers/ulysses.h"

struct RmsNormCase {
  int64_t rows, C;
  NormKind kind;
};

// One row, one column, tails of every vector width, more rows than partial sums on either device; rows that a block
// shares: with a tail, odd, and one too long for shared memory.
inline constexpr RmsNormCase kRmsNormCases[] = {
    {1, 1, NormKind::Plain},        {3, 7, NormKind::LateCast},      {5, 64, NormKind::OnePlus},
    {33, 100, NormKind::Plain},     {130, 33, NormKind::OnePlus},    {1100, 24, NormKind::LateCast},
    {4200, 3, NormKind::Plain},     {3, 2056, NormKind::OnePlus},    {2, 1031, NormKind::LateCast},
    {530, 1028, NormKind::OnePlus}, {2, 24584, NormKind::Plain},     {1, 1, NormKind::LayerNorm},
    {7, 33, NormKind::LayerNorm},   {600, 64, NormKind::LayerNorm},  {3, 2056, NormKind::LayerNorm},
    {2, 1031, NormKind::LayerNorm}, {2, 24584, NormKind::LayerNorm},
};

// Elements of flat tensors: none, fewer than a pack, fewer than the pieces or lanes of a sum on the CPU, tails of every
// kind; enough for three CPU threads, and for a thread of a kernel to go round its loop.
inline constexpr int64_t kFlatSizes[] = {0, 1, 15, 300, 5000, 65544, 131071};

struct EmbeddingCase {
  int64_t T, V, C;
};

// One token; tails of every vector width; one token that is everywhere; words that are frequent and words that are
// rare; rows that several warps share; more than 32 chunks of 32 positions.
inline constexpr EmbeddingCase kEmbeddingCases[] = {
    {1, 1, 1}, {7, 3, 5}, {30, 9, 70}, {150, 40, 200}, {200, 1, 24}, {1000, 300, 264}, {333, 2, 131}, {2100, 2, 8},
};

struct GatedActCase {
  int64_t T, F;
};

// One element, tails of every vector width, rows of one block and of several with a tail, several threads on the CPU.
inline constexpr GatedActCase kGatedActCases[] = {{1, 1}, {3, 7}, {5, 33}, {20, 100}, {2, 2056}, {50, 1001}};

struct RopeCase {
  int64_t T, H, HD, num_heads, half;
  bool interleaved;
};

// One pair; tails of every vector width; partial rotation; heads that stay; enough rows for several threads on the CPU;
// on CUDA, whole packs, partial rotation by packs of fp32 alone, more heads than a block takes at a time, and more
// pairs.
inline constexpr RopeCase kRopeCases[] = {
    {1, 1, 2, 1, 1, false},    {1, 1, 2, 1, 1, true},    {5, 4, 14, 3, 7, false},    {5, 4, 14, 3, 7, true},
    {9, 6, 24, 4, 9, false},   {9, 6, 24, 4, 9, true},   {150, 6, 64, 5, 32, false}, {150, 6, 64, 5, 32, true},
    {3, 3, 48, 2, 16, false},  {3, 3, 48, 2, 16, true},  {4, 5, 40, 5, 12, false},   {4, 5, 40, 5, 12, true},
    {2, 70, 16, 67, 8, false}, {2, 70, 16, 67, 8, true}, {2, 3, 88, 3, 43, false},   {2, 3, 88, 3, 43, true},
    {1, 2, 528, 2, 264, true}, {3, 2, 8, 0, 4, false},
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

// One row, one word; tiles that divide, do not divide, and are larger than T; a vocabulary of several blocks; scaled
// logits, with and without a cap.
inline constexpr LossCase kLossCases[] = {
    {1, 3, 5, {0, 1}, 0.0},       {7, 4, 1, {0, 2}},      {12, 5, 9, {0, 4}},     {13, 6, 17, {3.0, 4}, 0.0},
    {9, 8, 33, {2.0, 100}},       {6, 3, 2500, {0, 2}},   {5, 3, 1025, {5.0, 3}}, {11, 6, 33, {0, 4, 0.3}},
    {8, 7, 1030, {2.0, 3, -1.7}}, {700, 2, 3, {0, 1000}},
};

struct QkNormCase {
  int64_t T;
  QkNormShape shape;
  NormKind kind;
  int64_t half = 0;  ///< of the dimensions that rotate
  bool interleaved = false;
};

// One token; heads that share kv heads; tails of every vector width; more tokens than partial sums on either device; on
// CUDA, whole packs, more norms than teams, heads longer than a warp takes at once, norms that a block shares: with a
// tail, odd, and too long for shared memory. Of the rotation: none, all of a head, a part, a part that is not whole
// packs (of bf16 alone in one case), heads of an odd size.
inline constexpr QkNormCase kQkNormCases[] = {
    {1, {1, 1, 2, true}, NormKind::Plain},
    {1, {1, 1, 2, true}, NormKind::Plain, 1},
    {5, {4, 2, 7, true}, NormKind::OnePlus, 3, true},
    {5, {4, 2, 7, false}, NormKind::LateCast, 3},
    {33, {6, 3, 20, true}, NormKind::Plain, 10},
    {40, {3, 1, 33, false}, NormKind::Plain},
    {1100, {2, 1, 4, false}, NormKind::OnePlus, 1},
    {3, {8, 3, 264, true}, NormKind::LateCast, 132, true},
    {9, {5, 2, 64, true}, NormKind::Plain, 32},
    {9, {5, 2, 64, true}, NormKind::OnePlus, 16, true},
    {4, {3, 1, 40, true}, NormKind::LateCast, 12},
    {4, {3, 1, 40, true}, NormKind::Plain, 12, true},
    {7, {16, 4, 72, false}, NormKind::LateCast, 32},
    {3, {5, 1, 211, false}, NormKind::OnePlus, 100, true},
    {2, {1, 1, 1032, true}, NormKind::Plain, 516},
    {2, {24, 16, 640, false}, NormKind::OnePlus, 320, true},
};

struct RouteCase {
  int64_t T, C;
  RouterShape shape;
};

// One token and expert; every score; as many experts as are chosen; experts that stay idle; groups; more experts than
// a warp has lanes, and more tokens than a block has threads.
inline constexpr RouteCase kRouteCases[] = {
    {1, 8, {1, 1}},
    {7, 24, {4, 2}},
    {33, 13, {5, 5, RouterScore::SoftmaxAll}},
    {40, 64, {9, 3, RouterScore::SoftmaxAll}},
    {3, 40, {64, 8}},
    {50, 16, {12, 4, RouterScore::Sigmoid, true, 4, 2, 2.5}},
    {50, 16, {12, 4, RouterScore::Sigmoid, false, 1, 1, 0.5}},
    {300, 17, {40, 6, RouterScore::Sigmoid, true, 8, 3, 1}},
    {700, 8, {130, 2}},
};

struct GroupedLinearCase {
  std::vector<int64_t> rows;  ///< of each expert
  int64_t K, N;
};

// One row; empty experts first, last and between; tails of every tile; as many experts as go to a thread each; an
// expert with all rows.
inline const GroupedLinearCase kGroupedLinearCases[] = {
    {{1}, 1, 1},
    {{0, 3, 0, 17, 1, 0}, 24, 40},
    {{33, 5, 64}, 40, 17},
    {{0, 0, 130}, 72, 33},
    {{5, 0, 1, 9, 2, 7, 3, 11, 0, 4, 6, 8, 1, 1, 2, 3}, 16, 24},
};

struct MlaCase {
  int64_t T;
  MlaShape shape;
};

// One element of each; v as wide as q; odd widths; whole packs of fp32, and of bf16; more packs than a block has
// threads.
inline constexpr MlaCase kMlaCases[] = {{1, {1, 1, 2, 1}},    {7, {3, 5, 4, 9}},      {5, {4, 12, 8, 4}},
                                        {20, {2, 16, 8, 16}}, {3, {9, 128, 64, 128}}, {6, {2, 16, 8, 12}},
                                        {6, {2, 16, 4, 16}}};

struct UlyssesCase {
  int64_t Ts;
  UlyssesShape shape;
};

// As many kv heads as query heads; parts that share a kv head, two and eight of them; three parts; one part; on CUDA,
// whole packs, with and without sharing, one token, and parts longer than a block takes at once.
inline constexpr UlyssesCase kUlyssesCases[] = {
    {70, {8, 8, 3, 2}}, {70, {8, 2, 3, 4}}, {70, {6, 3, 2, 3}},  {70, {8, 1, 1, 8}},   {70, {4, 4, 5, 1}},
    {5, {8, 4, 8, 2}},  {5, {8, 2, 24, 8}}, {1, {12, 4, 16, 4}}, {2, {40, 8, 136, 2}},
};

struct AttentionCase {
  std::vector<int64_t> documents;  ///< lengths
  int64_t NH, NKV, HD;
  int64_t window = 0;
  double softcap = 0;
  double q_stddev = 1;
  bool has_sinks = false;
};

// Documents of one token, of two, odd, of several tiles (16, 32 and 64 tokens), many in a tile; MHA, GQA, MQA; windows
// of one token, shorter and longer than a tile; softcap; widths with a tail in a 128-bit pack, an odd one, and one for
// each width that the CUDA kernels pad to; sinks. At most 200 tokens, never a multiple of a tile.
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
    {{70, 1, 5}, 4, 2, 32, 40, 0, 1, true},
    {{3, 69}, 3, 1, 17, 0, 3.0, 4, true},
};
