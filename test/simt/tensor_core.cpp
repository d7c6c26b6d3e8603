// ldmatrix and mma as warp collectives, lane by lane through the fragment tables of the PTX manual.
#include <bit>
#include <cstring>

#include "test/simt/machine.h"

namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;

struct MatrixFrame {
  unsigned* matrix;  ///< 4
  const uint16_t* row;
};

/// Whether all 32 lanes are there; a report if not.
bool is_whole_warp(const char* name, uint32_t lanes) {
  if (lanes != kAllLanes) report("{} by {} of 32 lanes", name, std::popcount(lanes));
  return lanes == kAllLanes;
}

unsigned pair(uint16_t low, uint16_t high) {
  return low | static_cast<unsigned>(high) << 16;
}

/// Lane l gets of matrix i, whose rows lanes 8 i to 8 i + 7 point at: elements (l / 4, 2 (l % 4) + 0 and 1), or with
/// `kTransposed` elements (2 (l % 4) + 0 and 1, l / 4).
template <bool kTransposed>
void load_matrices(void* const* frames, uint32_t lanes) {
  if (!is_whole_warp("ldmatrix", lanes)) return;
  uint16_t element[4][8][8];
  for (unsigned lane = 0; lane < kWarpLanes; lane++) {
    std::memcpy(element[lane / 8][lane % 8], static_cast<MatrixFrame*>(frames[lane])->row, 16);
  }
  for (unsigned lane = 0; lane < kWarpLanes; lane++) {
    const unsigned a = lane / 4, b = lane % 4 * 2;
    for (int i = 0; i < 4; i++) {
      static_cast<MatrixFrame*>(frames[lane])->matrix[i] =
          kTransposed ? pair(element[i][b][a], element[i][b + 1][a]) : pair(element[i][a][b], element[i][a][b + 1]);
    }
  }
}

struct MmaFrame {
  float* d;           ///< 4
  const unsigned* a;  ///< 4
  unsigned b[2];
};

float low(unsigned pair) {
  return std::bit_cast<float>(pair << 16);
}
float high(unsigned pair) {
  return std::bit_cast<float>(pair & 0xffff0000u);
}

/// With g = lane / 4 and t = lane % 4:
///   A (16, 16): registers 0 to 3 hold rows g, g + 8, g, g + 8 and columns 2 t, 2 t, 2 t + 8, 2 t + 8, and the next
///   ones B (16, 8):  registers 0, 1 hold rows 2 t, 2 t + 8 of column g, and the next ones D (16, 8):  registers 0 to 3
///   hold (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)
void multiply(void* const* frames, uint32_t lanes) {
  if (!is_whole_warp("mma", lanes)) return;
  float A[16][16], B[16][8], D[16][8];
  for (unsigned lane = 0; lane < kWarpLanes; lane++) {
    const MmaFrame& frame = *static_cast<MmaFrame*>(frames[lane]);
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned i = 0; i < 4; i++) {
      const unsigned row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
      A[row][column] = low(frame.a[i]), A[row][column + 1] = high(frame.a[i]);
      D[g + i / 2 * 8][2 * t + i % 2] = frame.d[i];
    }
    for (unsigned i = 0; i < 2; i++) {
      B[2 * t + i * 8][g] = low(frame.b[i]), B[2 * t + i * 8 + 1][g] = high(frame.b[i]);
    }
  }
  for (int m = 0; m < 16; m++) {
    for (int k = 0; k < 16; k++) {
      for (int n = 0; n < 8; n++) D[m][n] += A[m][k] * B[k][n];
    }
  }
  for (unsigned lane = 0; lane < kWarpLanes; lane++) {
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned i = 0; i < 4; i++) static_cast<MmaFrame*>(frames[lane])->d[i] = D[g + i / 2 * 8][2 * t + i % 2];
  }
}

}  // namespace

void simt_load_matrices(unsigned (&matrix)[4], const void* row, bool transposed, const SimtSite& site) {
  constexpr size_t kRowBytes = 16;
  const uintptr_t address = reinterpret_cast<uintptr_t>(row);
  if (address % kRowBytes != 0 || !is_shared(address)) {
    machine.fatal = fmt::format("ldmatrix {}: {} gives {}, which is misaligned or not in shared memory", describe(site),
                                describe(*machine.current), describe_address(address));
    give_up();
  }
  checker_access(row, kRowBytes, false, __builtin_return_address(0));
  MatrixFrame frame = {matrix, static_cast<const uint16_t*>(row)};
  simt_warp_collective({"ldmatrix", transposed ? load_matrices<true> : load_matrices<false>, false}, kAllLanes, &frame,
                       site);
}

void simt_mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const SimtSite& site) {
  MmaFrame frame = {d, a, {b0, b1}};
  simt_warp_collective({"mma", multiply, false}, kAllLanes, &frame, site);
}
