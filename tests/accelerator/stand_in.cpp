// A stand-in accelerator for machines without one: torch's device "privateuseone", two of them.
//
// Its memory is the CPU's, and its operators fall back to those of the CPU. To torch it is a device like any other, with a
// dispatch key, a device guard, streams, events, pinned memory and autograd threads of its own, so what breaks on a GPU
// because of threads, devices and copies breaks here, too.
//
// A log notes what was asked of streams and events (see `note`). Asynchronous, copies that may be run later, by the thread
// of their stream, after a delay, and memory is NaN when it is allocated and when it is freed: a wait or a `record_stream`
// that is missing gives wrong numbers. Operators run when they are called, after everything on the current streams.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/ccol_indices_native.h>
#include <ATen/ops/col_indices_native.h>
#include <ATen/ops/crow_indices_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/row_indices_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType);  // its header includes everything that torch has
}

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 2;
using Clock = std::chrono::steady_clock;
using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kNumDevices] = {};
thread_local bool is_in_operator = false;  // its own copies are not those of a program

std::atomic<bool> is_asynchronous{false};
std::atomic<double> delay_s{0.0};

// Globals are never destroyed: threads of streams may run to the very end.

// -- the log ------------------------------------------------------------------------------------------------------------

std::mutex& log_mutex = *new std::mutex;  // guards `entries`
auto& entries = *new std::vector<std::string>;

// An entry: what was done, its stream ("-" if it has none), its event (0: none), and more.
void note(const std::string& what, const std::string& stream, int64_t event, const std::string& more = "") {
  const std::lock_guard lock(log_mutex);
  entries.push_back(what + " " + stream + " " + std::to_string(event) + (more.empty() ? "" : " " + more));
}

std::string name_of(const StreamKey& key) { return std::to_string(key.first) + ":" + std::to_string(key.second); }

std::vector<std::string> take_log() {
  const std::lock_guard lock(log_mutex);
  return std::exchange(entries, {});
}

// -- events and streams -------------------------------------------------------------------------------------------------

struct Event {
  const int64_t number;
  std::mutex mutex;  // guards the rest
  std::condition_variable changed;
  int64_t num_recorded = 0;
  int64_t num_done = 0;
  Clock::time_point done_at;

  explicit Event(int64_t number) : number(number) {}
  int64_t mark_recorded() {
    const std::lock_guard lock(mutex);
    return ++num_recorded;
  }
  void mark_done(int64_t version) {
    const std::lock_guard lock(mutex);
    num_done = std::max(num_done, version);
    done_at = Clock::now();
    changed.notify_all();
  }
  int64_t last_recorded() {
    const std::lock_guard lock(mutex);
    return num_recorded;
  }
  bool is_done() {
    const std::lock_guard lock(mutex);
    return num_done >= num_recorded;
  }
  void wait(int64_t version) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return num_done >= version; });
  }
};
using EventPtr = std::shared_ptr<Event>;

std::atomic<int64_t> num_events{0};
EventPtr make_event() { return std::make_shared<Event>(++num_events); }
Event& event_of(void* event) { return **static_cast<EventPtr*>(event); }

class Queue {  // the work of one stream, in order
 public:
  void submit(std::function<void()> job) {
    std::unique_lock lock(mutex_);
    if (!is_asynchronous && jobs_.empty() && !is_busy_) {
      lock.unlock();
      job();
      return;
    }
    jobs_.push_back(std::move(job));
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { run(); }).detach();
    }
    changed_.notify_all();
  }
  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return jobs_.empty() && !is_busy_;
  }
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return jobs_.empty() && !is_busy_; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !jobs_.empty(); });
      const auto job = std::move(jobs_.front());
      jobs_.pop_front();
      is_busy_ = true;
      lock.unlock();
      job();
      lock.lock();
      is_busy_ = false;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool is_busy_ = false;
  bool has_thread_ = false;
};

std::mutex& queues_mutex = *new std::mutex;  // guards the two below
auto& queues = *new std::map<StreamKey, std::unique_ptr<Queue>>;
c10::StreamId num_streams = 0;

Queue& queue_of(const StreamKey& key) {
  const std::lock_guard lock(queues_mutex);
  auto& queue = queues[key];
  if (!queue) queue = std::make_unique<Queue>();
  return *queue;
}

std::vector<Queue*> queues_of(int device) {
  const std::lock_guard lock(queues_mutex);
  std::vector<Queue*> found;
  for (auto& [key, queue] : queues)
    if (device < 0 || key.first == device) found.push_back(queue.get());
  return found;
}

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
StreamKey current_stream(c10::DeviceIndex device) { return {device, current_streams[device]}; }
c10::Stream stream_of(const StreamKey& key) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, key.first), key.second);
}

void record(const EventPtr& event, const StreamKey& stream) {
  queue_of(stream).submit([event, version = event->mark_recorded()] { event->mark_done(version); });
}

// -- memory -------------------------------------------------------------------------------------------------------------

struct Block {
  size_t size;
  c10::DeviceIndex device;  // -1: pinned memory of the host
  StreamKey home;           // the stream that it was allocated on
  std::set<StreamKey> users;
};

std::mutex& memory_mutex = *new std::mutex;  // guards the four below
auto& blocks = *new std::map<char*, Block>;
auto& registered = *new std::map<char*, size_t>;
auto& graveyard = *new std::vector<void*>;  // freed while work may still use them by mistake
int64_t allocated_bytes[kNumDevices] = {};

void spoil(void* data, size_t size) { std::memset(data, 0xFF, size); }  // NaN in every floating-point type

void* allocate_block(size_t size, c10::DeviceIndex device) {
  if (size == 0) return nullptr;
  auto* data = static_cast<char*>(c10::alloc_cpu(size));
  if (is_asynchronous) spoil(data, size);
  const std::lock_guard lock(memory_mutex);
  blocks[data] = {size, device, device < 0 ? StreamKey() : current_stream(device), {}};
  if (device >= 0) allocated_bytes[device] += static_cast<int64_t>(size);
  return data;
}

// The memory is used again when the work before this on its own stream is done, and on those that were recorded.
void free_block(void* data) {
  if (data == nullptr) return;
  Block block;
  {
    const std::lock_guard lock(memory_mutex);
    const auto found = blocks.find(static_cast<char*>(data));
    block = found->second;
    blocks.erase(found);
    if (block.device >= 0) allocated_bytes[block.device] -= static_cast<int64_t>(block.size);
  }
  if (!is_asynchronous && block.users.empty()) {
    c10::free_cpu(data);
    return;
  }
  if (block.device < 0 && !block.users.empty()) block.home = *block.users.begin();
  std::vector<EventPtr> events;
  for (const auto& user : block.users) {
    events.push_back(make_event());
    record(events.back(), user);
  }
  const auto retire = [events, data, size = block.size] {
    for (const auto& event : events) event->wait(1);
    spoil(data, size);
    const std::lock_guard lock(memory_mutex);
    graveyard.push_back(data);
  };
  if (block.device < 0 && block.users.empty())
    retire();
  else
    queue_of(block.home).submit(retire);
}

void add_user(const void* data, const StreamKey& stream) {
  const std::lock_guard lock(memory_mutex);
  auto found = blocks.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  if (found == blocks.begin()) return;
  --found;
  if (found->first + found->second.size > data && found->second.home != stream) found->second.users.insert(stream);
}

bool is_pinned(const void* data) {
  const std::lock_guard lock(memory_mutex);
  auto* const address = static_cast<char*>(const_cast<void*>(data));
  auto block = blocks.upper_bound(address);
  if (block != blocks.begin() && (--block)->second.device < 0 && address < block->first + block->second.size) return true;
  auto range = registered.upper_bound(address);
  return range != registered.begin() && address < (--range)->first + range->second;
}

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t num_bytes) override {
    void* data = allocate_block(num_bytes, current_device);
    return {data, data, &free_block, {kType, current_device}};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t num_bytes) override {
    note("pin", "-", 0, std::to_string(num_bytes));
    void* data = allocate_block(num_bytes, -1);
    return {data, data, &free_block, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};

Allocator& allocator = *new Allocator;
PinnedAllocator& pinned_allocator = *new PinnedAllocator;

void register_memory(int64_t address, int64_t num_bytes) {
  note("register", "-", 0, std::to_string(num_bytes));
  const std::lock_guard lock(memory_mutex);
  registered[reinterpret_cast<char*>(address)] = num_bytes;
}

void unregister_memory(int64_t address) {
  note("unregister", "-", 0);
  const std::lock_guard lock(memory_mutex);
  TORCH_CHECK(registered.erase(reinterpret_cast<char*>(address)), "this memory was not registered");
}

int64_t memory_allocated(int64_t device) {
  const std::lock_guard lock(memory_mutex);
  return allocated_bytes[device];
}

// Run work later, after that time; or everything at once, as it is called. Waits for what is under way.
void set_asynchronous(bool value, double seconds) {
  for (auto* queue : queues_of(-1)) queue->drain();
  delay_s = seconds;
  is_asynchronous = value;
  const std::lock_guard lock(memory_mutex);
  for (auto* data : std::exchange(graveyard, {})) c10::free_cpu(data);
}

// -- what torch asks of a device ----------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;

  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kNumDevices, "invalid device ordinal ", static_cast<int>(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(current_stream(device.has_index() ? device.index() : current_device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of({device.has_index() ? device.index() : current_device, 0});
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const std::lock_guard lock(queues_mutex);
    return stream_of({device.has_index() ? device.index() : current_device, ++num_streams});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventPtr(make_event());
    note("record", name_of(key_of(stream)), event_of(*event).number);
    ::record(*static_cast<EventPtr*>(*event), key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    note("wait", name_of(key_of(stream)), event_of(event).number);
    const auto kept = *static_cast<EventPtr*>(event);
    queue_of(key_of(stream)).submit([kept, version = kept->last_recorded()] { kept->wait(version); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const bool is_done = event_of(event).is_done();
    if (is_done) note("found_done", "-", event_of(event).number);
    return is_done;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    note("synchronize_event", "-", event_of(event).number);
    event_of(event).wait(event_of(event).last_recorded());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(event_of(second).done_at - event_of(first).done_at).count();
  }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(key_of(stream)).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    note("synchronize_stream", name_of(key_of(stream)), 0);
    queue_of(key_of(stream)).drain();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    note("synchronize_device", std::to_string(device) + ":*", 0);
    for (auto* queue : queues_of(device)) queue->drain();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    add_user(data.get(), key_of(stream));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

const bool has_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

// -- operators ----------------------------------------------------------------------------------------------------------

c10::Device device_or_current(std::optional<at::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kType, current_device);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

// The same memory, as a tensor of the CPU that does not keep it.
at::Tensor on_cpu(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  auto made = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

void drain_current_streams() {
  for (c10::DeviceIndex device = 0; device < kNumDevices; ++device) queue_of(current_stream(device)).drain();
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (is_in_operator) {
    on_cpu(target).copy_(on_cpu(source));
    return target;
  }
  const bool is_to_host = target.is_cpu(), is_from_host = source.is_cpu();
  const auto stream = current_stream((is_from_host ? target : source).device().index());
  bool may_be_later = non_blocking && is_asynchronous && target.numel() > 0;
  std::string more = is_to_host ? "to_host" : is_from_host ? "to_device" : "on_device";
  more += non_blocking ? " non_blocking" : " blocking";
  if (is_to_host || is_from_host) {
    const auto* host = (is_to_host ? target : source).data_ptr();
    const bool pinned = is_pinned(host);
    more += pinned ? " pinned" : " pageable";
    may_be_later = may_be_later && pinned;
    if (pinned && may_be_later) add_user(host, stream);
  } else if (target.device() != source.device()) {
    queue_of(current_stream(target.device().index())).drain();
    may_be_later = false;
  }
  note("copy", name_of(stream), 0, more + " " + std::to_string(target.nbytes()));
  queue_of(stream).submit([may_be_later, to = on_cpu(target), from = on_cpu(source)] {
    const c10::InferenceMode mode;
    if (may_be_later) std::this_thread::sleep_for(std::chrono::duration<double>(delay_s));
    to.copy_(from);
  });
  if (!may_be_later) queue_of(stream).drain();
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar to_scalar(const at::Tensor& tensor) {
  drain_current_streams();
  return on_cpu(tensor).item();
}

at::Tensor as_strided(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  note("record_stream", name_of(key_of(stream)), 0);
  add_user(tensor.storage().data(), key_of(stream));
}

at::Tensor make_sparse(int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef size, const at::Tensor& indices,
                       const at::Tensor& values, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool> pinned, std::optional<bool> is_coalesced) {
  const c10::DeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(sparse_dim, dense_dim, size, indices, values, dtype, layout,
                                                            device, pinned, is_coalesced);
}

at::Tensor cast_and_multiply(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  const auto dtype = at::autocast::get_autocast_dtype(kType);
  return at::linear(input.to(dtype), weight.to(dtype), bias ? std::optional(bias->to(dtype)) : std::nullopt);
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  drain_current_streams();
  note("operator", name_of(current_stream(current_device)), 0, op.schema().name());
  struct Inside {
    const bool before = std::exchange(is_in_operator, true);
    ~Inside() { is_in_operator = before; }
  } const inside;
  at::native::cpu_fallback(op, stack);
}

REGISTER_ALLOCATOR(kType, &allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY(stand_in, library) {
  library.def("take_log() -> str[]", &take_log);
  library.def("set_asynchronous(bool value, float seconds) -> ()", &set_asynchronous);
  library.def("register_memory(int address, int num_bytes) -> ()", &register_memory);
  library.def("unregister_memory(int address) -> ()", &unregister_memory);
  library.def("memory_allocated(int device) -> int", &memory_allocated);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &to_scalar);
  library.impl("record_stream", &record_stream);
  // These change metadata alone.
  library.impl("as_strided", &as_strided);
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("resize_", TORCH_FN(at::native::resize_));
}

// Copies know the conj and neg bits: without them, torch resolves these by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) { library.impl("linear", &cast_and_multiply); }

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {  // to make and to take apart
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", &make_sparse);
  library.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  library.impl("_values", TORCH_FN(at::native::_values_sparse));
  library.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  library.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  library.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
  library.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  library.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, library) {  // to take apart; torch can make them
  library.impl("crow_indices", TORCH_FN(at::native::crow_indices_sparse_csr));
  library.impl("col_indices", TORCH_FN(at::native::col_indices_sparse_csr));
  library.impl("ccol_indices", TORCH_FN(at::native::ccol_indices_sparse_csr));
  library.impl("row_indices", TORCH_FN(at::native::row_indices_sparse_csr));
  library.impl("values", TORCH_FN(at::native::values_sparse_csr));
}

}  // namespace
