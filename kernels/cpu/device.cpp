// Lazy streams: a queue of items a stream, and an engine that passes them on demand. An event is a position in a queue,
// so recording costs nothing and leaves nothing behind; a wait is passed once the other queue has passed that position.
#include "kernels/cpu/device.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <thread>
#include <utility>
#include <variant>

#include "core/error.h"
#include "core/random.h"

namespace qe {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr int kSpins = 64;  // yields before the host starts to sleep between polls
constexpr auto kNap = std::chrono::microseconds(50);

using Clock = std::chrono::steady_clock;
using Work = std::function<void()>;

// Bytes of the machine. Linux promises more and kills who uses it.
std::size_t host_memory() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// Without swapping, as far as the system tells.
std::size_t available_memory() {
  std::ifstream info("/proc/meminfo");
  std::string key;
  for (std::size_t kibibytes = 0; info >> key >> kibibytes; info.ignore(80, '\n')) {
    if (key == "MemAvailable:") return kibibytes << 10;
  }
  return host_memory();
}

}  // namespace

struct CpuDevice::Queue {
  struct Wait {
    std::shared_ptr<Queue> on;
    std::uint64_t position;
  };
  struct Message {
    std::unique_ptr<Pending> pending;
    bool started = false;
  };
  using Item = std::variant<Work, Wait, Message>;

  std::string name;
  const CpuDevice* owner;
  std::deque<Item> items;
  std::uint64_t enqueued = 0;   // items ever
  std::uint64_t completed = 0;  // items passed; always enqueued - items.size()
  bool closed = false;

  void push(Item item) {
    items.push_back(std::move(item));
    ++enqueued;
  }
  void drop() noexcept {
    items.clear();
    completed = enqueued;
  }
  [[nodiscard]] const Pending* blocker() const {  // the message that keeps the head from passing, if there is one
    if (items.empty()) return nullptr;
    if (const auto* wait = std::get_if<Wait>(&items.front())) {
      return wait->on->completed < wait->position ? wait->on->blocker() : nullptr;
    }
    const auto* message = std::get_if<Message>(&items.front());
    return message == nullptr ? nullptr : message->pending.get();
  }
  [[nodiscard]] std::string describe_head() const {
    if (const auto* wait = std::get_if<Wait>(&items.front())) return "stream '" + wait->on->name + "'";
    const auto* message = std::get_if<Message>(&items.front());
    return message == nullptr ? "its turn to compute" : message->pending->describe();
  }
};

class CpuDevice::CpuStream final : public Stream {
 public:
  explicit CpuStream(std::shared_ptr<Queue> queue) : queue_(std::move(queue)) {}
  ~CpuStream() override {
    queue_->drop();
    queue_->closed = true;
  }
  CpuStream(const CpuStream&) = delete;
  CpuStream& operator=(const CpuStream&) = delete;
  [[nodiscard]] const std::shared_ptr<Queue>& queue() const noexcept { return queue_; }

 private:
  std::shared_ptr<Queue> queue_;
};

class CpuDevice::CpuEvent final : public Event {
 public:
  explicit CpuEvent(bool is_timed) : timed(is_timed) {}
  const bool timed;
  std::shared_ptr<Queue> on;  // null before the first record
  std::uint64_t position = 0;
  std::shared_ptr<Clock::time_point> passed;  // of the latest record of a timed event
};

class CpuDevice::CpuGraph final : public Graph {
 public:
  explicit CpuGraph(std::vector<Work> nodes) : nodes_(std::make_shared<std::vector<Work>>(std::move(nodes))) {}
  [[nodiscard]] int nodes() const override { return static_cast<int>(nodes_->size()); }
  [[nodiscard]] const std::shared_ptr<std::vector<Work>>& work() const noexcept { return nodes_; }

 private:
  std::shared_ptr<std::vector<Work>> nodes_;  // shared with launches that have not run yet
};

CpuDevice::CpuDevice(DrainPolicy policy, std::uint64_t seed)
    : policy_(policy), wanders_(policy == DrainPolicy::kAdversarial && seed != 0), seed_(seed) {}

CpuDevice::~CpuDevice() {
  for (const auto& queue : queues_) queue->drop();  // waits hold their queues, so cycles end here
}

std::string CpuDevice::description() const {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "CPU reference backend, AVX2";
#endif
  return "CPU reference backend, portable code";
}

std::unique_ptr<Stream> CpuDevice::make_stream(const std::string& name) {
  std::erase_if(queues_, [](const auto& queue) { return queue->closed; });
  auto queue = std::make_shared<Queue>();
  queue->name = name;
  queue->owner = this;
  queues_.push_back(queue);
  return std::make_unique<CpuStream>(std::move(queue));
}

std::unique_ptr<Event> CpuDevice::make_event() { return std::make_unique<CpuEvent>(false); }
std::unique_ptr<Event> CpuDevice::make_timed_event() { return std::make_unique<CpuEvent>(true); }

MemoryPool CpuDevice::memory_pool() const { return {"host", available_memory(), 0}; }

Buffer CpuDevice::allocate(std::size_t bytes, MemoryKind kind) {
  QE_EXPECTS(capture_ == nullptr, "memory cannot be allocated inside a capture");
  if (bytes == 0) return Buffer(*this, nullptr, 0, kind);
  const std::size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const bool fits = padded >= bytes && padded <= host_memory() - std::min(total_, host_memory());
  void* data = fits ? std::aligned_alloc(kAlignment, padded) : nullptr;
  if (data == nullptr) {
    throw DeviceError(owner_ + ": the host has no " + std::to_string(bytes) + " bytes left for " + name_of(kind) +
                      " (held now: " + std::to_string(total_) + " bytes); use a smaller model or fewer microbatches");
  }
  std::memset(data, 0, padded);
  bytes_[static_cast<std::size_t>(kind)] += bytes;
  total_ += bytes;
  peak_ = std::max(peak_, total_);
  return Buffer(*this, data, bytes, kind);
}

HostMemory CpuDevice::allocate_host(std::size_t bytes) {
  return {new unsigned char[bytes], [](unsigned char* p) noexcept { delete[] p; }};
}

void CpuDevice::deallocate(void* data, std::size_t bytes, MemoryKind kind) noexcept {
  std::free(data);
  bytes_[static_cast<std::size_t>(kind)] -= bytes;
  total_ -= bytes;
}

void CpuDevice::copy(Stream& s, void* to, const void* from, std::size_t bytes) {
  if (bytes != 0) enqueue(s, [=] { std::memmove(to, from, bytes); });
}
void CpuDevice::zero(Stream& s, void* data, std::size_t bytes) {
  if (bytes != 0) enqueue(s, [=] { std::memset(data, 0, bytes); });
}
void CpuDevice::download(Stream& s, void* host_to, const void* from, std::size_t bytes) {
  copy(s, host_to, from, bytes);
}
void CpuDevice::host_call(Stream& s, Work call) { enqueue(s, std::move(call)); }

void CpuDevice::upload(Stream& s, void* to, const void* host_from, std::size_t bytes) {
  QE_EXPECTS(capture_ == nullptr, "an upload reads the host once, so a graph cannot replay it");
  if (bytes == 0) return;
  const auto* from = static_cast<const std::byte*>(host_from);
  enqueue(s, [to, kept = std::vector<std::byte>(from, from + bytes)] { std::memcpy(to, kept.data(), kept.size()); });
}

void CpuDevice::record(Event& event, Stream& s) {
  QE_EXPECTS(capture_ == nullptr, "an event cannot be recorded inside a capture");
  auto& e = static_cast<CpuEvent&>(event);
  if (e.timed) {
    e.passed = std::make_shared<Clock::time_point>();
    enqueue(s, [at = e.passed] { *at = Clock::now(); });
  }
  e.position = queue_of(s).enqueued;
  e.on = static_cast<CpuStream&>(s).queue();
}

void CpuDevice::wait(Stream& s, const Event& event) {
  QE_EXPECTS(capture_ == nullptr, "a stream cannot wait inside a capture");
  Queue& queue = queue_of(s);
  const auto& e = static_cast<const CpuEvent&>(event);
  if (e.on == nullptr || e.on->completed >= e.position) return;
  queue.push(Queue::Wait{e.on, e.position});
  if (policy_ == DrainPolicy::kImmediate) pump();
}

double CpuDevice::elapsed_ms(const Event& from, const Event& to) {
  const auto& a = static_cast<const CpuEvent&>(from);
  const auto& b = static_cast<const CpuEvent&>(to);
  QE_EXPECTS(a.passed && b.passed, "both events are timed and recorded");
  return std::chrono::duration<double, std::milli>(*b.passed - *a.passed).count();
}

void CpuDevice::synchronize(Stream& s) {
  expect_host_may_block();
  settle(queue_of(s));
}

void CpuDevice::synchronize() {
  expect_host_may_block();
  const std::size_t count = queues_.size();
  const std::size_t first = count == 0 ? 0 : draw(count);
  for (std::size_t i = 0; i < count; ++i) settle(*queues_[(first + i) % count]);
}

std::unique_ptr<Graph> CpuDevice::capture(Stream& s, const std::function<void()>& body) {
  QE_EXPECTS(capture_ == nullptr, "captures do not nest");
  Capture capture{&queue_of(s), {}};
  struct Mode {  // left on every way out of body
    Capture*& mode;
    ~Mode() { mode = nullptr; }
  } mode{capture_ = &capture};
  body();
  return std::make_unique<CpuGraph>(std::move(capture.nodes));
}

void CpuDevice::launch(Graph& graph, Stream& s) {
  QE_EXPECTS(capture_ == nullptr, "a graph cannot be launched inside a capture");
  enqueue(s, [nodes = static_cast<CpuGraph&>(graph).work()] {
    for (const Work& node : *nodes) node();
  });
}

void CpuDevice::enqueue(Stream& s, Work work) {
  QE_EXPECTS(!running_, "work on a stream called the device");
  Queue& queue = queue_of(s);
  if (capture_ != nullptr) {
    QE_EXPECTS(capture_->queue == &queue, "another stream was used inside a capture");
    capture_->nodes.push_back(std::move(work));
    return;
  }
  if (policy_ != DrainPolicy::kImmediate) return queue.push(std::move(work));
  if (queue.items.empty()) {
    ++queue.enqueued;
    ++queue.completed;
    run(work);
  } else {
    queue.push(std::move(work));
  }
  pump();
}

void CpuDevice::enqueue_message(Stream& s, std::unique_ptr<Pending> message) {
  QE_EXPECTS(!running_, "work on a stream called the device");
  QE_EXPECTS(capture_ == nullptr, "a message cannot be captured on the CPU backend");
  queue_of(s).push(Queue::Message{std::move(message)});
  if (policy_ == DrainPolicy::kImmediate) pump();
}

void CpuDevice::wait_until(const std::function<bool()>& done, const std::function<std::string()>& what) {
  expect_host_may_block();
  Patience patience;
  int idle = 0;
  for (;;) {
    const std::uint64_t before = progress_;
    if (done()) break;
    policy_ == DrainPolicy::kImmediate ? pump() : discharge();
    if (progress_ != before) {
      patience.reset();
      idle = 0;
      continue;
    }
    wait_.look(patience.seconds(), what, [this] { return describe_streams(); });
    ++idle < kSpins ? std::this_thread::yield() : std::this_thread::sleep_for(kNap);
  }
  wait_.over();
}

CpuDevice::Queue& CpuDevice::queue_of(Stream& s) const {
  Queue& queue = *static_cast<CpuStream&>(s).queue();
  QE_EXPECTS(queue.owner == this, "the stream belongs to another device");
  return queue;
}

void CpuDevice::expect_host_may_block() const {
  QE_EXPECTS(!running_, "work on a stream called the device");
  QE_EXPECTS(capture_ == nullptr, "the host cannot block inside a capture");
}

// Passes the queue's items up to a position; false when a message that has not come yet is in the way. A wait demands
// exactly the recorded position of the other queue. Positions are recorded before they are waited for, so the recursion
// visits a stream at most once and ends.
bool CpuDevice::advance(Queue& queue, std::uint64_t position) {
  while (queue.completed < position) {
    Queue::Item& head = queue.items.front();
    if (auto* wait = std::get_if<Queue::Wait>(&head)) {
      if (!advance(*wait->on, wait->position)) return false;
    } else if (auto* message = std::get_if<Queue::Message>(&head)) {
      if (!message->started) {
        message->started = true;
        ++progress_;
        message->pending->start();
      }
      if (!message->pending->poll()) return false;
    }
    const Queue::Item item = std::move(head);
    queue.items.pop_front();
    ++queue.completed;
    ++progress_;
    if (const auto* work = std::get_if<Work>(&item)) run(*work);
  }
  return true;
}

void CpuDevice::settle(Queue& queue) {
  const std::uint64_t target = queue.enqueued;
  const auto demand = [&] {
    while (wanders_ && queue.completed < target) {
      wander();
      if (!advance(queue, std::min(target, queue.completed + 1 + draw(4)))) return false;
    }
    return advance(queue, target);
  };
  wait_until(demand, [&] {
    const Pending* message = queue.blocker();
    return message == nullptr ? "stream '" + queue.name + "'" : message->describe();
  });
}

void CpuDevice::pump() {
  for (std::uint64_t before = progress_ - 1; before != progress_;) {
    before = progress_;
    for (const auto& queue : queues_) {
      if (!queue->items.empty()) advance(*queue, queue->enqueued);
    }
  }
}

// Runs every queue as far as its last send or reduction that has not started.
void CpuDevice::discharge() {
  const std::size_t count = queues_.size();
  const std::size_t first = count == 0 ? 0 : draw(count);
  for (std::size_t k = 0; k < count; ++k) {
    Queue& queue = *queues_[(first + k) % count];
    for (std::size_t i = queue.items.size(); i-- > 0;) {
      const auto* message = std::get_if<Queue::Message>(&queue.items[i]);
      if (message == nullptr || message->started || !message->pending->is_obligation()) continue;
      advance(queue, queue.completed + i + 1);
      break;
    }
  }
}

// Lets a few streams run ahead of the demand, which is always legal.
void CpuDevice::wander() {
  for (std::uint64_t steps = draw(4); steps > 0; --steps) {
    Queue& queue = *queues_[draw(queues_.size())];
    advance(queue, std::min(queue.enqueued, queue.completed + 1 + draw(4)));
  }
}

void CpuDevice::run(const Work& work) {
  struct Running {
    bool& flag;
    ~Running() { flag = false; }
  } running{running_ = true};
  work();
}

std::string CpuDevice::describe_streams() const {
  std::string text;
  for (const auto& queue : queues_) {
    if (queue->items.empty()) continue;
    text += "\n  stream '" + queue->name + "' (" + std::to_string(queue->items.size()) + " queued) waits for " +
            queue->describe_head();
  }
  return text;
}

std::uint64_t CpuDevice::draw(std::uint64_t bound) { return wanders_ ? philox(seed_, 0, draws_++).w[0] % bound : 0; }

}  // namespace qe
