// For a build of PyTorch without CUDA: one device whose guard does nothing, so that fake tensors on "cuda:0" can be
// indexed and differentiated. It registers itself when it is loaded, which has to be before PyTorch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
struct OneCard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device card() { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return card(); }
  Device getDevice() const override { return card(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, card()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, card()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, OneCard)
} // namespace c10::impl

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at
