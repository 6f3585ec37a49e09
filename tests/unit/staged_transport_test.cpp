// Messages through memory that processes share, over threads: a stand-in for the device runs each stream on a thread of
// its own and late, so that a missing wait reads stale bytes and a block reused too early is overwritten.
#include "kernels/wire/staged_transport.h"

#include <array>
#include <atomic>
#include <barrier>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "core/error.h"
#include "core/random.h"
#include "kernels/cpu/thread_transport.h"
#include "tests/catch.h"

using qe::Action;
using qe::ActionKind;
using qe::Group;
using qe::run_ranks;
using qe::ThreadWorld;

namespace {

// Catch's assertions are not for several threads, so a rank throws instead.
void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("not kept: " + what);
}

Action label(ActionKind kind, int stage, int microbatch) {
  return {kind, qe::StageIndex{stage}, qe::MicrobatchIndex{microbatch}};
}

class LateStream final : public qe::Stream {
 public:
  explicit LateStream(std::uint64_t seed) : seed_(seed), worker_([this](const std::stop_token& stop) { work(stop); }) {}

  void enqueue(std::function<void()> item) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(item));
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
  }

 private:
  void work(const std::stop_token& stop) {
    for (std::uint64_t n = 0;; ++n) {
      std::function<void()> item;
      {
        std::unique_lock lock(mutex_);
        if (!changed_.wait(lock, stop, [&] { return !queue_.empty(); })) return;
        item = std::move(queue_.front());
        queue_.pop_front();
        busy_ = true;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(qe::philox(seed_, 0, n).w[0] % 200));
      item();
      const std::lock_guard lock(mutex_);
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::uint64_t seed_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  std::jthread worker_;  // last: it uses the others
};

LateStream& late(qe::Stream& s) { return dynamic_cast<LateStream&>(s); }

template <class T>
qe::ShareHandle handle_of(const std::shared_ptr<T>& shared) {
  qe::ShareHandle handle{};
  const auto* address = &shared;
  std::memcpy(handle.data(), &address, sizeof address);
  return handle;
}
template <class T>
std::shared_ptr<T> open(const qe::ShareHandle& handle) {
  const std::shared_ptr<T>* address = nullptr;
  std::memcpy(&address, handle.data(), sizeof address);
  return *address;
}

class HeapBlock final : public qe::PeerBlock {
 public:
  using Bytes = std::vector<std::byte>;
  explicit HeapBlock(std::shared_ptr<Bytes> shared) : shared_(std::move(shared)) {}
  [[nodiscard]] void* data() const override { return shared_->data(); }
  [[nodiscard]] std::size_t bytes() const override { return shared_->size(); }
  [[nodiscard]] qe::ShareHandle handle() const override { return handle_of(shared_); }

 private:
  std::shared_ptr<Bytes> shared_;
};

class CountedEvent final : public qe::PeerEvent {
 public:
  struct Counts {
    std::atomic<int> issued = 0, done = 0;
  };
  explicit CountedEvent(std::shared_ptr<Counts> shared) : shared_(std::move(shared)) {}
  void record(qe::Stream& s) override {
    late(s).enqueue([shared = shared_, n = shared_->issued + 1] { shared->done = n; });
    ++shared_->issued;
  }
  void wait(qe::Stream& s) override {
    const int target = shared_->issued;
    require(target > 0, "a wait is called after the record that it means");
    late(s).enqueue([shared = shared_, target] {
      while (shared->done < target) std::this_thread::yield();
    });
  }
  [[nodiscard]] qe::ShareHandle handle() const override { return handle_of(shared_); }

 private:
  std::shared_ptr<Counts> shared_;
};

class HeapMemory final : public qe::PeerMemory {
 public:
  explicit HeapMemory(std::vector<LateStream*> streams) : streams_(std::move(streams)) {}
  std::unique_ptr<qe::PeerBlock> make_block(std::size_t bytes) override {
    return std::make_unique<HeapBlock>(std::make_shared<HeapBlock::Bytes>(bytes));
  }
  std::unique_ptr<qe::PeerBlock> open_block(const qe::ShareHandle& handle) override {
    return std::make_unique<HeapBlock>(open<HeapBlock::Bytes>(handle));
  }
  std::unique_ptr<qe::PeerEvent> make_event() override {
    return std::make_unique<CountedEvent>(std::make_shared<CountedEvent::Counts>());
  }
  std::unique_ptr<qe::PeerEvent> open_event(const qe::ShareHandle& handle) override {
    return std::make_unique<CountedEvent>(open<CountedEvent::Counts>(handle));
  }
  void copy(qe::Stream& s, void* to, const void* from, std::size_t bytes) override {
    late(s).enqueue([=] { std::memcpy(to, from, bytes); });
  }
  void combine(qe::Stream& s, qe::Combine combine, float* out, std::span<const float* const> parts,
               std::int64_t count) override {
    late(s).enqueue([=, parts = std::vector<const float*>(parts.begin(), parts.end())] {
      for (std::int64_t i = 0; i < count; ++i) {
        float total = parts[0][i];
        for (std::size_t r = 1; r < parts.size(); ++r) {
          total = combine == qe::Combine::kSum ? total + parts[r][i] : std::max(total, parts[r][i]);
        }
        out[i] = total;
      }
    });
  }
  void set_host_wait(const qe::HostWait&) override {}
  void synchronize() override {
    for (LateStream* s : streams_) s->synchronize();
  }

 private:
  std::vector<LateStream*> streams_;
};

struct Rank {
  Rank(ThreadWorld& world, int rank, int pipeline, int data = 1, const qe::WaitRule& rule = 60)
      : out(2 * static_cast<std::uint64_t>(rank)),
        in(2 * static_cast<std::uint64_t>(rank) + 1),
        transport(std::make_unique<HeapMemory>(std::vector{&out, &in}), world.wire(rank),
                  qe::RankLayout{rank, pipeline, data}, rule) {}
  LateStream out, in;
  qe::StagedTransport transport;
};

}  // namespace

TEST_CASE("staged messages of one directed edge arrive in list order, however late the streams are") {
  ThreadWorld world(2, 1);
  run_ranks(world, [&](int rank) {
    Rank r(world, rank, 2);
    constexpr int kMessages = 100;
    std::vector<int> source(1, -1), got(kMessages, -1);
    for (int i = 0; i < kMessages; ++i) {
      // One source for all of them: a copy that runs late would send a later value.
      r.out.enqueue([&, i] { source[0] = 1000 * rank + i; });
      r.transport.send(r.out, source.data(), sizeof(int), 1 - rank, label(ActionKind::kSendF, rank, i));
      if (i >= 3) {
        r.transport.recv(r.in, &got[static_cast<std::size_t>(i - 3)], sizeof(int), 1 - rank,
                         label(ActionKind::kRecvF, rank, i - 3));
      }
    }
    for (int i = kMessages - 3; i < kMessages; ++i) {
      r.transport.recv(r.in, &got[static_cast<std::size_t>(i)], sizeof(int), 1 - rank,
                       label(ActionKind::kRecvF, rank, i));
    }
    r.out.synchronize();
    r.in.synchronize();
    for (int i = 0; i < kMessages; ++i) {
      require(got[static_cast<std::size_t>(i)] == 1000 * (1 - rank) + i, "message " + std::to_string(i));
    }
  });
}

TEST_CASE("a staged send never waits; blocks grow to the messages under way and are used again") {
  ThreadWorld world(2, 1);
  run_ranks(world, [&](int rank) {
    Rank r(world, rank, 2);
    constexpr int kAhead = 5;
    std::vector<int> values(kAhead), got(kAhead);
    for (int round = 0; round < 4; ++round) {
      // Both ranks send everything before either receives.
      for (int i = 0; i < kAhead; ++i) {
        values[static_cast<std::size_t>(i)] = 100 * round + i;
        r.transport.send(r.out, &values[static_cast<std::size_t>(i)], sizeof(int), 1 - rank,
                         label(ActionKind::kSendF, rank, i));
      }
      r.transport.barrier(Group::kWorld);
      for (int i = 0; i < kAhead; ++i) {
        r.transport.recv(r.in, &got[static_cast<std::size_t>(i)], sizeof(int), 1 - rank,
                         label(ActionKind::kRecvF, rank, i));
      }
      r.out.synchronize();
      r.in.synchronize();
      require(got == values, "the bytes of round " + std::to_string(round));
      require(r.transport.blocks() == kAhead, "five blocks for five messages under way");
      r.transport.barrier(Group::kWorld);
    }
  });
}

TEST_CASE("staged messages of several sizes and none at all take blocks that fit") {
  ThreadWorld world(2, 1);
  run_ranks(world, [&](int rank) {
    Rank r(world, rank, 2);
    for (const std::size_t bytes :
         {std::size_t{64}, std::size_t{0}, std::size_t{4096}, std::size_t{1}, std::size_t{64}}) {
      std::vector<unsigned char> out(bytes, static_cast<unsigned char>(bytes + static_cast<std::size_t>(rank)));
      std::vector<unsigned char> in(bytes);
      r.transport.send(r.out, out.data(), bytes, 1 - rank, label(ActionKind::kSendB, rank, 0));
      r.transport.recv(r.in, in.data(), bytes, 1 - rank, label(ActionKind::kRecvB, rank, 0));
      r.out.synchronize();
      r.in.synchronize();
      require(in == std::vector<unsigned char>(bytes,
                                               static_cast<unsigned char>(bytes + 1 - static_cast<std::size_t>(rank))),
              "the bytes of a message of " + std::to_string(bytes));
    }
  });
}

TEST_CASE("staged reductions have rank order, equal bits everywhere, and stay within their group") {
  ThreadWorld world(2, 2);
  run_ranks(world, [&](int rank) {
    Rank r(world, rank, 2, 2);
    for (int round = 0; round < 10; ++round) {
      // From the left 1 is lost beside 2^24; from the right it is not.
      std::vector<float> ordered(3, rank == 0 ? 0x1p24f : 1.0F);
      auto replicas = static_cast<float>(rank + round), peak = static_cast<float>(rank - round);
      std::vector<int> all(4, -1);
      r.transport.all_reduce_sum(r.out, ordered.data(), 3, Group::kWorld);
      r.transport.all_reduce_sum(r.in, &replicas, 1, Group::kData);
      r.transport.all_reduce_max(r.in, &peak, 1, Group::kPipeline);
      r.transport.all_gather(r.out, &rank, all.data(), sizeof rank, Group::kWorld);
      r.out.synchronize();
      r.in.synchronize();
      require(ordered == std::vector<float>(3, 0x1p24f), "the order of a sum");
      require(replicas == static_cast<float>(2 * (rank % 2) + 2 + 2 * round), "the data group's sum");
      require(peak == static_cast<float>(rank / 2 * 2 + 1 - round), "the pipeline group's maximum");
      require(all == std::vector<int>{0, 1, 2, 3}, "gathered in rank order");
    }
  });
}

TEST_CASE("a staged message of another size names itself and both sizes") {
  ThreadWorld world(2, 1);
  REQUIRE_THROWS_WITH(run_ranks(world,
                                [&](int rank) {
                                  Rank r(world, rank, 2);
                                  char memory[16] = {};
                                  if (rank == 0) {
                                    r.transport.send(r.out, memory, 8, 1, label(ActionKind::kSendF, 0, 3));
                                    r.out.synchronize();
                                    try {
                                      r.transport.barrier(Group::kWorld);
                                    } catch (const qe::Error&) {  // that rank 1 failed, and nothing of why
                                    }
                                  } else {
                                    r.transport.recv(r.in, memory, 16, 0, label(ActionKind::kRecvF, 1, 3));
                                  }
                                }),
                      ContainsSubstring("1RECV_F3") && ContainsSubstring("carries 8 bytes where 16"));
}

TEST_CASE("past the deadline a staged receive names the message, the peer and the seconds") {
  ThreadWorld world(2, 1);
  std::atomic<bool> told = false;
  run_ranks(world, [&](int rank) {
    Rank r(world, rank, 2, 1, 0.2);
    int value = 0;
    if (rank == 1) {
      try {
        r.transport.recv(r.in, &value, sizeof value, 0, label(ActionKind::kRecvB, 1, 2));
      } catch (const qe::DeviceError& e) {
        const std::string text = e.what();
        told = text.find("rank 1 waits for 1RECV_B2 (4 bytes) from rank 0 since 0.2 s") != std::string::npos;
      }
    }
  });
  CHECK(told);
}

TEST_CASE("a rank that leaves long after the others is no failure", "[slow]") {
  ThreadWorld world(2, 1);
  std::array<std::string, 2> texts;
  std::barrier meet(2);
  std::atomic<int> told = 0, failed = 0;
  run_ranks(world, [&](int rank) {
    const auto exchange = [&](const std::string& mine) {
      texts[static_cast<std::size_t>(rank)] = mine;
      meet.arrive_and_wait();
      const std::vector<std::string> all(texts.begin(), texts.end());
      meet.arrive_and_wait();
      return all;
    };
    qe::JobBoard board(rank, exchange, [&](const std::string&) { ++told; });
    {
      const Rank r(world, rank, 2, 1, {60, &board});
      if (rank == 0) std::this_thread::sleep_for(std::chrono::seconds(6));
    }
    failed += board.failure() ? 1 : 0;
    meet.arrive_and_wait();
  });
  CHECK(told == 0);
  CHECK(failed == 0);
}

TEST_CASE("when a rank fails the others stop waiting at once and name it") {
  ThreadWorld world(2, 1);
  const auto start = std::chrono::steady_clock::now();
  std::string reason;
  std::atomic<bool> ready = false;
  REQUIRE_THROWS_WITH(run_ranks(2,
                                [&](int rank) {
                                  Rank r(world, rank, 2);
                                  if (rank == 0) {
                                    while (!ready) std::this_thread::yield();
                                    throw std::runtime_error("first failure");
                                  }
                                  int value = 0;
                                  ready = true;
                                  try {
                                    r.transport.recv(r.in, &value, sizeof value, 0, label(ActionKind::kRecvF, 1, 0));
                                  } catch (const qe::Error& e) {
                                    reason = e.what();
                                  }
                                }),
                      ContainsSubstring("first failure"));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
  CHECK_THAT(reason, ContainsSubstring("another rank") || ContainsSubstring("rank 0 failed"));
}
