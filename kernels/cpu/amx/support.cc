#include "kernels/cpu/amx/support.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace stiefel {
namespace {

struct Cpuid {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero where the processor has no such leaf.
Cpuid CpuidOf(uint32_t leaf, uint32_t subleaf) {
  Cpuid id;
  if (__get_cpuid_count(leaf, subleaf, &id.eax, &id.ebx, &id.ecx, &id.edx) == 0) return Cpuid();
  return id;
}

bool HasBit(uint32_t value, int bit) { return (value >> bit & 1) != 0; }

// XCR0: the register states that the kernel saves.
uint64_t SavedStates() {
  if (!HasBit(CpuidOf(1, 0).ecx, 27)) return 0;  // OSXSAVE
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

constexpr uint64_t kAvx512States =
    0xE6;  // SSE, AVX, masks and both halves of the 512-bit registers
constexpr int kTileData = 18;
constexpr uint64_t kTileStates = uint64_t{3} << 17;  // configuration and data

bool ProcessorHasTiles() {
  const Cpuid features = CpuidOf(7, 0);
  if (!HasBit(features.edx, 22) || !HasBit(features.edx, 24)) return false;  // AMX-BF16, AMX-TILE
  if (CpuidOf(0x1D, 0).eax < 1) return false;                                // highest palette
  const Cpuid palette = CpuidOf(0x1D, 1);
  const uint32_t tile_bytes = palette.eax >> 16, row_bytes = palette.ebx & 0xFFFF;
  const uint32_t tiles = palette.ebx >> 16, rows = palette.ecx & 0xFFFF;
  return tile_bytes == 1024 && row_bytes == 64 && tiles >= 8 && rows == 16;
}

// Linux gives the large tile registers only to processes that ask.
bool KernelGrantsTiles() {
  constexpr int kGetPermission = 0x1022, kRequestPermission = 0x1023;  // ARCH_*_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
  uint64_t granted = 0;
  return syscall(SYS_arch_prctl, kGetPermission, &granted) == 0 && (granted >> kTileData & 1) != 0;
}

}  // namespace

bool CpuHasAvx512Bf16() {
  static const bool has = [] {
    const Cpuid features = CpuidOf(7, 0);
    return (SavedStates() & kAvx512States) == kAvx512States && HasBit(features.ebx, 16) &&  // F
           HasBit(features.ebx, 17) && HasBit(features.ebx, 30) &&    // DQ, BW
           HasBit(features.ebx, 31) && HasBit(CpuidOf(7, 1).eax, 5);  // VL, BF16
  }();
  return has;
}

bool CpuHasAmx() {
  static const bool has = CpuHasAvx512Bf16() && (SavedStates() & kTileStates) == kTileStates &&
                          ProcessorHasTiles() && KernelGrantsTiles();
  return has;
}

}  // namespace stiefel
