// A guard for devices that aren't there: torch built without CUDA asks it which one is current.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::Device at(c10::DeviceIndex index) const { return {c10::DeviceType::CUDA, index}; }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return at(current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
};

const Guard guard;
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);

// Autograd asks whether there is an accelerator at all.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 8; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
};

struct Registered {
  Registered() {
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks", [](at::CUDAHooksArgs) { return std::make_unique<Hooks>(); });
  }
} const hooks;

}  // namespace

extern "C" int current_device() { return current; }
extern "C" void set_device(int index) { current = static_cast<c10::DeviceIndex>(index); }
