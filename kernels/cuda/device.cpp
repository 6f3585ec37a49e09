#include "kernels/cuda/device.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>

#include "core/error.h"
#include "kernels/cuda/architecture.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/device_tables.h"
#include "kernels/cuda/handles.h"

namespace qe {

namespace {

constexpr std::size_t kStreamBytes = cuda::kScratchBytes + CudaDevice::kGemmWorkspaceBytes;
// Of up to this many host bytes the driver takes a copy inside the call; of more it does not promise to.
constexpr std::size_t kCopiedInCall = std::size_t{64} << 10;

cudaDeviceProp properties_of(int ordinal) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    throw DeviceError(std::string("no CUDA device was found (") +
                      (status != cudaSuccess ? cudaGetErrorString(status) : "the driver lists none") +
                      "); set execution.backend to cpu or run on a machine with an NVIDIA GPU and its driver.");
  }
  if (ordinal < 0 || ordinal >= count) {
    throw DeviceError("CUDA device " + std::to_string(ordinal) + " was asked for, but this process sees " +
                      std::to_string(count) + "; start at most one rank a GPU or set CUDA_VISIBLE_DEVICES.");
  }
  cudaDeviceProp properties{};
  QE_CUDA_CHECK(cudaGetDeviceProperties(&properties, ordinal));
  return properties;
}

bool is_page_locked(const void* host) {
  cudaPointerAttributes attributes{};
  QE_CUDA_CHECK(cudaPointerGetAttributes(&attributes, host));
  return attributes.type == cudaMemoryTypeHost;
}

std::string gibibytes(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", static_cast<double>(bytes) / static_cast<double>(std::size_t{1} << 30));
  return text;
}

}  // namespace

class CudaDevice::CudaStream final : public Stream {
 public:
  CudaStream(CudaDevice& device, std::string name) : device_(device), name_(std::move(name)) {
    cudaStream_t stream = nullptr;
    QE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    handle_.reset(stream);
    device_.streams_.push_back(this);
  }
  ~CudaStream() override { std::erase(device_.streams_, this); }

  [[nodiscard]] cudaStream_t handle() const noexcept { return handle_.get(); }
  // Before a call in which the driver itself waits for the stream, as a copy from or to pageable memory may: the driver
  // knows no deadline, and a message that never comes would hold the host in it for ever.
  void wait_under_deadline() const {
    if (device_.host_waiter_) synchronize();
  }
  void synchronize() const {
    if (!device_.host_waiter_) return check(cudaStreamSynchronize(handle()));
    device_.host_waiter_([&] { return is_idle(); }, [&] { return "stream '" + name_ + "'"; });
  }

  Buffer workspace;                    // scratch, then the GEMMs' workspace
  std::optional<cuda::Launch> launch;  // once there is a workspace

 private:
  void check(cudaError_t status) const {
    if (status == cudaSuccess) return;
    cuda::fail(("work on stream '" + name_ + "'").c_str(), cudaGetErrorString(status), __FILE__, __LINE__);
  }
  [[nodiscard]] bool is_idle() const {
    const cudaError_t status = cudaStreamQuery(handle());
    if (status == cudaErrorNotReady) return false;
    check(status);
    return true;
  }

  CudaDevice& device_;
  std::string name_;
  cuda::StreamHandle handle_;
};

class CudaDevice::CudaEvent final : public Event {
 public:
  explicit CudaEvent(unsigned flags) {
    cudaEvent_t event = nullptr;
    QE_CUDA_CHECK(cudaEventCreateWithFlags(&event, flags));
    handle_.reset(event);
  }
  [[nodiscard]] cudaEvent_t handle() const noexcept { return handle_.get(); }

 private:
  cuda::EventHandle handle_;
};

// The first exception of a host call since the last synchronize(). Host calls run on a thread of the driver.
struct CudaDevice::HostErrors {
  void keep(const char* what) {
    const std::lock_guard lock(mutex);
    if (first.empty()) first = what;
  }
  void rethrow() {
    const std::lock_guard lock(mutex);
    if (!first.empty()) throw DeviceError("a host call in a stream failed: " + std::exchange(first, {}));
  }
  std::mutex mutex;
  std::string first;
};

struct CudaDevice::HostCall {
  std::function<void()> work;
  std::shared_ptr<HostErrors> errors;

  static void run(void* call) noexcept {
    const auto* self = static_cast<HostCall*>(call);
    try {
      self->work();
    } catch (const std::exception& e) {
      self->errors->keep(e.what());
    } catch (...) {
      self->errors->keep("an exception that is not a std::exception");
    }
  }
  static void CUDART_CB run_captured(void* call) { run(call); }
  static void CUDART_CB run_once(void* call) {
    run(call);
    delete static_cast<HostCall*>(call);
  }
};

// The graph keeps what its host nodes use: their calls, and page-locked memory where its downloads land.
class CudaDevice::CudaGraph final : public Graph {
 public:
  [[nodiscard]] int nodes() const override { return nodes_; }
  [[nodiscard]] cudaGraphExec_t handle() const noexcept { return exec_.get(); }

  HostCall* keep(HostCall call) {
    calls_.push_back(std::make_unique<HostCall>(std::move(call)));
    return calls_.back().get();
  }
  void* staging(std::size_t bytes) {
    constexpr std::size_t kAlign = 64;
    bytes = (bytes + kAlign - 1) / kAlign * kAlign;
    if (bytes > left_) {
      constexpr std::size_t kChunk = std::size_t{1} << 20;
      left_ = std::max(bytes, kChunk);
      void* chunk = nullptr;
      QE_CUDA_CHECK(cudaMallocHost(&chunk, left_));
      staging_.emplace_back(chunk);
      next_ = static_cast<unsigned char*>(chunk);
    }
    left_ -= bytes;
    return std::exchange(next_, next_ + bytes);
  }
  void instantiate(cudaGraph_t graph, cudaStream_t stream) {
    std::size_t count = 0;
    QE_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    nodes_ = static_cast<int>(count);
    cudaGraphExec_t exec = nullptr;
    QE_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    exec_.reset(exec);
    QE_CUDA_CHECK(cudaGraphUpload(exec, stream));
  }

 private:
  int nodes_ = 0;
  std::vector<std::unique_ptr<HostCall>> calls_;
  std::vector<cuda::PinnedMemory> staging_;
  unsigned char* next_ = nullptr;
  std::size_t left_ = 0;
  cuda::GraphExecHandle exec_;
};

struct CudaDevice::Capture {
  CudaStream* stream;
  CudaGraph* graph;
};

CudaDevice::CudaDevice(int ordinal) : ordinal_(ordinal), host_errors_(std::make_shared<HostErrors>()) {
  const cudaDeviceProp card = properties_of(ordinal);
  const std::string version = std::to_string(card.major) + "." + std::to_string(card.minor);
  if (card.major * 10 + card.minor < 89) {
    throw DeviceError(std::string(card.name) + " has compute capability " + version +
                      ", but FP8 arithmetic needs 8.9 or newer; use another GPU or set execution.backend to cpu.");
  }
  QE_CUDA_CHECK(cudaSetDevice(ordinal));
  if (!cuda::has_code_for_current_device()) {
    throw DeviceError("this build has no code for " + std::string(card.name) + " (compute capability " + version +
                      "); configure with -DCMAKE_CUDA_ARCHITECTURES=" + std::to_string(card.major * 10 + card.minor) +
                      " and build again.");
  }
  description_ = std::string(card.name) + ", sm_" + std::to_string(card.major * 10 + card.minor);
  multiprocessors_ = card.multiProcessorCount;
  setup_ = make_stream("setup");
  tables_ = std::make_unique<cuda::UploadedTables>(*this);
}

CudaDevice::~CudaDevice() = default;

CudaDevice::CudaStream& CudaDevice::stream_of(Stream& s) const {
  auto& stream = static_cast<CudaStream&>(s);
  QE_EXPECTS(capture_ == nullptr || capture_->stream == &stream, "a capture uses its own stream only");
  return stream;
}
int CudaDevice::count() noexcept {
  int cards = 0;
  if (cudaGetDeviceCount(&cards) == cudaSuccess) return cards;
  (void)cudaGetLastError();
  return 0;
}

void CudaDevice::expect_no_capture() const {
  QE_EXPECTS(capture_ == nullptr, "a graph holds work of one stream: nothing is made, waited for or launched inside");
}

std::unique_ptr<Stream> CudaDevice::make_stream(const std::string& name) {
  expect_no_capture();
  return std::make_unique<CudaStream>(*this, name);
}
std::unique_ptr<Event> CudaDevice::make_event() {
  expect_no_capture();
  return std::make_unique<CudaEvent>(cudaEventDisableTiming);
}
std::unique_ptr<Event> CudaDevice::make_timed_event() {
  expect_no_capture();
  return std::make_unique<CudaEvent>(cudaEventDefault);
}

HostMemory CudaDevice::allocate_host(std::size_t bytes) {
  expect_no_capture();
  void* data = nullptr;
  if (bytes > 0 && cudaMallocHost(&data, bytes) != cudaSuccess) {
    (void)cudaGetLastError();
    throw std::bad_alloc();
  }
  return {static_cast<unsigned char*>(data), [](unsigned char* p) noexcept { (void)cudaFreeHost(p); }};
}

Buffer CudaDevice::allocate(std::size_t bytes, MemoryKind kind) {
  expect_no_capture();
  if (bytes == 0) return {*this, nullptr, 0, kind};
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) out_of_memory(bytes, kind);
  QE_CUDA_CHECK(status);
  bytes_[static_cast<std::size_t>(kind)] += bytes;
  total_ += bytes;
  peak_ = std::max(peak_, total_);
  Buffer buffer(*this, data, bytes, kind);
  zero(*setup_, data, bytes);
  static_cast<CudaStream&>(*setup_).synchronize();
  return buffer;
}

void CudaDevice::deallocate(void* data, std::size_t bytes, MemoryKind kind) noexcept {
  (void)cudaFree(data);
  bytes_[static_cast<std::size_t>(kind)] -= bytes;
  total_ -= bytes;
}

MemoryPool CudaDevice::memory_pool() const {
  char pci[32];
  QE_CUDA_CHECK(cudaDeviceGetPCIBusId(pci, sizeof pci, ordinal_));
  std::size_t free = 0, total = 0;
  QE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return {pci, free, kStreamBytes};
}

void CudaDevice::out_of_memory(std::size_t bytes, MemoryKind kind) const {
  (void)cudaGetLastError();
  std::size_t free = 0, total = 0;
  (void)cudaMemGetInfo(&free, &total);
  throw DeviceError(std::string("Memory of kind ") + name_of(kind) + " needs " + gibibytes(bytes) + " GiB, but " +
                    description_ + " has " + gibibytes(free) + " of " + gibibytes(total) +
                    " GiB free; use a smaller model or fewer tokens a microbatch, or more ranks.");
}

void CudaDevice::copy(Stream& s, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  QE_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(s).handle()));
}
void CudaDevice::zero(Stream& s, void* data, std::size_t bytes) {
  if (bytes == 0) return;
  QE_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, stream_of(s).handle()));
}

void CudaDevice::upload(Stream& s, void* to, const void* host_from, std::size_t bytes) {
  QE_EXPECTS(capture_ == nullptr, "an upload reads the host once, so a graph cannot replay it");
  if (bytes == 0) return;
  const CudaStream& stream = stream_of(s);
  if (bytes > kCopiedInCall) stream.wait_under_deadline();
  QE_CUDA_CHECK(cudaMemcpyAsync(to, host_from, bytes, cudaMemcpyHostToDevice, stream.handle()));
  if (bytes > kCopiedInCall) stream.synchronize();
}

void CudaDevice::download(Stream& s, void* host_to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  CudaStream& stream = stream_of(s);
  if (capture_ == nullptr) {
    if (!is_page_locked(host_to)) stream.wait_under_deadline();
    QE_CUDA_CHECK(cudaMemcpyAsync(host_to, from, bytes, cudaMemcpyDeviceToHost, stream.handle()));
    return;
  }
  // A copy node promises nothing about pageable memory, so a replay lands in page-locked memory of the graph first.
  void* staged = capture_->graph->staging(bytes);
  QE_CUDA_CHECK(cudaMemcpyAsync(staged, from, bytes, cudaMemcpyDeviceToHost, stream.handle()));
  enqueue_host_call(stream, [host_to, staged, bytes] { std::memcpy(host_to, staged, bytes); });
}

void CudaDevice::host_call(Stream& s, std::function<void()> work) { enqueue_host_call(stream_of(s), std::move(work)); }

void CudaDevice::enqueue_host_call(CudaStream& stream, std::function<void()> work) {
  HostCall call{std::move(work), host_errors_};
  if (capture_ != nullptr) {
    HostCall* kept = capture_->graph->keep(std::move(call));
    QE_CUDA_CHECK(cudaLaunchHostFunc(stream.handle(), HostCall::run_captured, kept));
    return;
  }
  auto once = std::make_unique<HostCall>(std::move(call));
  QE_CUDA_CHECK(cudaLaunchHostFunc(stream.handle(), HostCall::run_once, once.get()));
  (void)once.release();  // deletes itself when it has run
}

void CudaDevice::record(Event& e, Stream& s) {
  expect_no_capture();
  QE_CUDA_CHECK(cudaEventRecord(native(e), stream_of(s).handle()));
}
void CudaDevice::wait(Stream& s, const Event& e) {
  expect_no_capture();
  QE_CUDA_CHECK(cudaStreamWaitEvent(stream_of(s).handle(), native(e), 0));
}
double CudaDevice::elapsed_ms(const Event& from, const Event& to) {
  float ms = 0.0f;
  QE_CUDA_CHECK(cudaEventElapsedTime(&ms, native(from), native(to)));
  return static_cast<double>(ms);
}
void CudaDevice::synchronize(Stream& s) {
  expect_no_capture();
  stream_of(s).synchronize();
  host_errors_->rethrow();
}
void CudaDevice::synchronize() {
  expect_no_capture();
  for (const CudaStream* stream : streams_) stream->synchronize();
  host_errors_->rethrow();
}

std::unique_ptr<Graph> CudaDevice::capture(Stream& s, const std::function<void()>& body) {
  expect_no_capture();
  CudaStream& stream = stream_of(s);
  make_workspace(stream);  // inside nothing may be allocated
  auto graph = std::make_unique<CudaGraph>();
  Capture capture{&stream, graph.get()};
  QE_CUDA_CHECK(cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeRelaxed));
  capture_ = &capture;
  cudaGraph_t recorded = nullptr;
  try {
    body();
  } catch (...) {
    capture_ = nullptr;
    (void)cudaStreamEndCapture(stream.handle(), &recorded);
    (void)cudaGetLastError();
    const cuda::GraphHandle discarded(recorded);
    throw;
  }
  capture_ = nullptr;
  QE_CUDA_CHECK(cudaStreamEndCapture(stream.handle(), &recorded));
  const cuda::GraphHandle owner(recorded);
  graph->instantiate(recorded, stream.handle());
  return graph;
}

void CudaDevice::launch(Graph& g, Stream& s) {
  expect_no_capture();
  QE_CUDA_CHECK(cudaGraphLaunch(static_cast<CudaGraph&>(g).handle(), stream_of(s).handle()));
}

void CudaDevice::make_workspace(CudaStream& stream) {
  if (stream.launch) return;
  stream.workspace = allocate(kStreamBytes, MemoryKind::kWorkspace);
  const cuda::Scratch scratch{stream.workspace.data(), cuda::kScratchBytes};
  stream.launch.emplace(cuda::Launch{stream.handle(), scratch, *tables_, multiprocessors_});
}

const cuda::Launch& CudaDevice::launch_on(Stream& s) {
  CudaStream& stream = stream_of(s);
  make_workspace(stream);
  return *stream.launch;
}
cuda::Scratch CudaDevice::gemm_workspace(Stream& s) {
  CudaStream& stream = stream_of(s);
  make_workspace(stream);
  return {stream.workspace.as<unsigned char>() + cuda::kScratchBytes, kGemmWorkspaceBytes};
}

cudaStream_t CudaDevice::native(Stream& s) const { return stream_of(s).handle(); }
cudaEvent_t CudaDevice::native(const Event& e) const { return static_cast<const CudaEvent&>(e).handle(); }

}  // namespace qe
