// A device for torch whose memory is the host's, and which refuses whatever a GPU refuses: tensors of two devices in one operation, a CPU
// tensor in its collectives, numpy on its memory. Operations run on the CPU. torch's name for such a device is PrivateUse1.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/as_strided_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using Tensors = std::vector<Tensor>;
constexpr auto kPretended = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kPretended, 0);

bool is_on_device(const Tensor& t) {
  return t.device().type() == kPretended;
}

// The same memory as a CPU tensor, which keeps it alive.
Tensor on_cpu(const Tensor& t) {
  if (!is_on_device(t)) return t;
  auto options = t.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), [t](void*) {}, options);
}

// --- memory -------------------------------------------------------------------------------------------------------

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    TORCH_CHECK(memory || !bytes, "out of memory");
    return {memory, memory, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &std::free;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
} allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kPretended;
  explicit Guard(c10::DeviceType = kPretended) {}
  c10::DeviceType type() const override {
    return kPretended;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return getStream(kDevice);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  bool isPinnedPtr(const void*) const override {
    return false;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto memory = allocator.allocate(bytes);
    if (auto kept = std::min(bytes, impl->nbytes())) std::memcpy(memory.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(bytes);
  }
} hooks;

// --- operations that make, view and copy tensors ------------------------------------------------------------------

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::ScalarType dtype_of(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, kKeys, dtype_of(dtype), format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, kKeys, dtype_of(dtype));
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor view(const Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize_(const Tensor& self, SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  auto bytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
  if (bytes > impl->unsafe_storage().nbytes()) hooks.resizePrivateUse1Bytes(impl->unsafe_storage(), bytes);
  impl->set_sizes_contiguous(sizes);
  return self;
}

Tensor& set_storage_part(Tensor& self, at::Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset.expect_int());
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.size() == size.size())
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  else
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_part(
      self, source.storage(), source.storage_offset(), c10::fromIntArrayRefSlow(source.sizes()),
      c10::fromIntArrayRefSlow(source.strides()));
}

Tensor& set_storage(Tensor& self, at::Storage storage) {
  const SymInt size(static_cast<int64_t>(storage.nbytes() / self.itemsize()));
  return set_storage_part(self, std::move(storage), 0, {size}, {SymInt(1)});
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar item(const Tensor& self) {
  return at::_local_scalar_dense(on_cpu(self));
}

// --- all others ---------------------------------------------------------------------------------------------------

std::atomic<int64_t> operations{0};

bool takes_indices_from_cpu(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::index_put" || name == "aten::_index_put_impl_";
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  operations++;
  bool device = false, cpu = false;
  auto look = [&](const Tensor& t) {
    if (t.defined() && t.dim() > 0) (is_on_device(t) ? device : cpu) = true;  // a number may come from the CPU
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor())
      look(value.toTensor());
    else if (value.isTensorList())
      for (const Tensor& t : value.toTensorVector()) look(t);
    else if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        if (t) look(*t);
  }
  TORCH_CHECK(!(device && cpu) || takes_indices_from_cpu(op), op.operator_name(), ": tensors on two devices");
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
}

// --- collectives --------------------------------------------------------------------------------------------------

// What NCCL takes: contiguous tensors of its device.
Tensor taken(const Tensor& t) {
  TORCH_CHECK(is_on_device(t) && t.is_contiguous(), "a collective of the device was given a tensor on ", t.device(),
              t.is_contiguous() ? "" : " that is not contiguous");
  return on_cpu(t);
}

Tensors taken(const Tensors& tensors) {
  Tensors out;
  for (const auto& t : tensors) out.push_back(taken(t));
  return out;
}

std::vector<Tensors> taken(const std::vector<Tensors>& lists) {
  std::vector<Tensors> out;
  for (const auto& tensors : lists) out.push_back(taken(tensors));
  return out;
}

// A group of the device: gloo's, on the same memory.
struct Group final : c10d::Backend {
  using Work = c10::intrusive_ptr<c10d::Work>;
  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<Options> options = c10::make_intrusive<Options>("pretended");

  explicit Group(c10::intrusive_ptr<c10d::Backend> group)
      : Backend(group->getRank(), group->getSize()), gloo(std::move(group)) {}
  const std::string getBackendName() const override {
    return "pretended";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return 0;
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& how) override {
    auto own = taken(tensors);
    return gloo->broadcast(own, how);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& how) override {
    auto own = taken(tensors);
    return gloo->allreduce(own, how);
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& how) override {
    auto own = taken(tensors);
    return gloo->allreduce_coalesced(own, how);
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& how) override {
    auto own = taken(tensors);
    return gloo->reduce(own, how);
  }
  Work allgather(std::vector<Tensors>& all, Tensors& mine, const c10d::AllgatherOptions& how) override {
    auto out = taken(all);
    auto in = taken(mine);
    return gloo->allgather(out, in, how);
  }
  Work _allgather_base(Tensor& all, Tensor& mine, const c10d::AllgatherOptions& how) override {
    auto out = taken(all), in = taken(mine);
    return gloo->_allgather_base(out, in, how);
  }
  Work allgather_into_tensor_coalesced(Tensors& all, Tensors& mine, const c10d::AllgatherOptions& how) override {
    auto out = taken(all), in = taken(mine);
    return gloo->allgather_into_tensor_coalesced(out, in, how);
  }
  Work gather(std::vector<Tensors>& all, Tensors& mine, const c10d::GatherOptions& how) override {
    auto out = taken(all);
    auto in = taken(mine);
    return gloo->gather(out, in, how);
  }
  Work scatter(Tensors& mine, std::vector<Tensors>& all, const c10d::ScatterOptions& how) override {
    auto out = taken(mine);
    auto in = taken(all);
    return gloo->scatter(out, in, how);
  }
  Work reduce_scatter(Tensors& mine, std::vector<Tensors>& all, const c10d::ReduceScatterOptions& how) override {
    auto out = taken(mine);
    auto in = taken(all);
    return gloo->reduce_scatter(out, in, how);
  }
  Work _reduce_scatter_base(Tensor& mine, Tensor& all, const c10d::ReduceScatterOptions& how) override {
    auto out = taken(mine), in = taken(all);
    return gloo->_reduce_scatter_base(out, in, how);
  }
  Work reduce_scatter_tensor_coalesced(Tensors& mine, Tensors& all, const c10d::ReduceScatterOptions& how) override {
    auto out = taken(mine), in = taken(all);
    return gloo->reduce_scatter_tensor_coalesced(out, in, how);
  }
  Work alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                     const c10d::AllToAllOptions& how) override {
    auto to = taken(out), from = taken(in);
    return gloo->alltoall_base(to, from, out_sizes, in_sizes, how);
  }
  Work send(Tensors& tensors, int to, int tag) override {
    auto own = taken(tensors);
    return gloo->send(own, to, tag);
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    auto own = taken(tensors);
    return gloo->recv(own, from, tag);
  }
  Work barrier(const c10d::BarrierOptions&) override {
    return gloo->barrier();
  }
};

}  // namespace

PYBIND11_MODULE(pretended_device, m) {
  pybind11::module_::import("torch._C._distributed_c10d");
  c10::SetAllocator(kPretended, &allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("on_cpu", &on_cpu);
  m.def("operations", [] { return operations.load(); });
  pybind11::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(m, "Group")
      .def(pybind11::init<c10::intrusive_ptr<c10d::Backend>>());
}
