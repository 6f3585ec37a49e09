#include "kernels/cpu/thread_transport.h"

#include <compare>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cpu/message_transport.h"

namespace qe {

struct ThreadWorld::State {
  struct Slot {
    int from;
    int to;
    Channel channel;
    std::uint64_t sequence;
    auto operator<=>(const Slot&) const = default;
  };

  const int pipeline;
  const int data;
  const double timeout_s;
  std::mutex mutex;  // guards what follows
  std::map<Slot, std::vector<std::byte>> mail;
  std::vector<bool> connected;
  bool aborted = false;
  std::string reason;

  State(int p, int d, double t) : pipeline(p), data(d), timeout_s(t), connected(static_cast<std::size_t>(p * d)) {}

  void abort(const std::string& why) noexcept {
    const std::lock_guard lock(mutex);
    if (aborted) return;
    aborted = true;
    try {
      reason = why;
    } catch (...) {  // without memory for the text the abort still counts
    }
  }
  void expect_alive() const {  // call with the mutex held
    if (aborted) throw WorldAborted("the run was ended by another rank: " + reason);
  }
};

class ThreadWire final : public Wire {
 public:
  ThreadWire(std::shared_ptr<ThreadWorld::State> state, int rank) : state_(std::move(state)), rank_(rank) {}
  ~ThreadWire() override {
    if (std::uncaught_exceptions() > exceptions_) state_->abort("rank " + std::to_string(rank_) + " failed");
  }
  ThreadWire(const ThreadWire&) = delete;
  ThreadWire& operator=(const ThreadWire&) = delete;

  void post(const Address& to, const void* data, std::size_t bytes) override {
    const auto* from = static_cast<const std::byte*>(data);
    std::vector<std::byte> payload(from, from + bytes);
    const std::lock_guard lock(state_->mutex);
    state_->expect_alive();
    state_->mail[{rank_, to.peer, to.channel, to.sequence}] = std::move(payload);
  }

  std::unique_ptr<Receive> expect(const Address& from, void* data, std::size_t bytes, std::string what) override {
    return std::make_unique<Mailbox>(state_, ThreadWorld::State::Slot{from.peer, rank_, from.channel, from.sequence},
                                     data, bytes, std::move(what));
  }

 private:
  class Mailbox final : public Receive {
   public:
    Mailbox(std::shared_ptr<ThreadWorld::State> state, ThreadWorld::State::Slot slot, void* data, std::size_t bytes,
            std::string what)
        : state_(std::move(state)), slot_(slot), data_(data), bytes_(bytes), what_(std::move(what)) {}

    bool done() override {
      std::vector<std::byte> payload;
      {
        const std::lock_guard lock(state_->mutex);
        state_->expect_alive();
        const auto found = state_->mail.find(slot_);
        if (found == state_->mail.end()) return false;
        payload = std::move(found->second);
        state_->mail.erase(found);
      }
      if (payload.size() != bytes_) throw size_mismatch(slot_.to, what_, std::to_string(payload.size()), bytes_);
      if (bytes_ != 0) std::memcpy(data_, payload.data(), bytes_);
      return true;
    }

   private:
    std::shared_ptr<ThreadWorld::State> state_;
    ThreadWorld::State::Slot slot_;
    void* data_;
    std::size_t bytes_;
    std::string what_;
  };

  std::shared_ptr<ThreadWorld::State> state_;
  int rank_;
  int exceptions_ = std::uncaught_exceptions();
};

ThreadWorld::ThreadWorld(int pipeline, int data, double timeout_s)
    : state_(std::make_shared<State>(pipeline, data, timeout_s)) {}

std::shared_ptr<Wire> ThreadWorld::wire(int world_rank) {
  QE_EXPECTS(world_rank >= 0 && world_rank < ranks(), "no such rank in this world");
  {
    const std::lock_guard lock(state_->mutex);
    auto connected = state_->connected[static_cast<std::size_t>(world_rank)];
    QE_EXPECTS(!connected, "a rank connects once: its sequence numbers start at 0");
    connected = true;
  }
  return std::make_shared<ThreadWire>(state_, world_rank);
}

std::unique_ptr<Transport> ThreadWorld::connect(int world_rank, CpuDevice& device) {
  return std::make_unique<MessageTransport>(device, wire(world_rank),
                                            RankLayout{world_rank, state_->pipeline, state_->data}, state_->timeout_s);
}

void ThreadWorld::abort(const std::string& why) noexcept { state_->abort(why); }

int ThreadWorld::ranks() const noexcept { return state_->pipeline * state_->data; }

namespace {

void run_threads(int ranks, const std::function<void(int)>& body, const std::function<void(const char*)>& on_error) {
  std::mutex mutex;  // guards the two
  std::exception_ptr cause;
  std::exception_ptr echo;
  const auto run = [&](int rank) {
    try {
      body(rank);
    } catch (const WorldAborted&) {
      const std::lock_guard lock(mutex);
      if (echo == nullptr) echo = std::current_exception();
    } catch (const std::exception& e) {
      on_error(e.what());
      const std::lock_guard lock(mutex);
      if (cause == nullptr) cause = std::current_exception();
    }
  };
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  threads.clear();  // joins
  if (cause != nullptr) std::rethrow_exception(cause);
  if (echo != nullptr) std::rethrow_exception(echo);
}

}  // namespace

void run_ranks(int ranks, const std::function<void(int rank)>& body) {
  run_threads(ranks, body, [](const char*) {});
}

void run_ranks(ThreadWorld& world, const std::function<void(int rank)>& body) {
  run_threads(world.ranks(), body, [&](const char* why) { world.abort(why); });
}

}  // namespace qe
