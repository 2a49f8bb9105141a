// Eight devices that aren't there, for a torch built without CUDA, and the one that is current.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>

using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;

namespace at {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Autograd asks whether there is an accelerator at all.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::impl::kFakeGuardImplMaxDevices; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

extern "C" int current_device() { return Guard::getDeviceIndex(); }
extern "C" int exchange_device(int index) {
  const int before = current_device();
  if (index >= 0) Guard::setDeviceIndex(static_cast<c10::DeviceIndex>(index));
  return before;
}
