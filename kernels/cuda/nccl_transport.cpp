#include "kernels/cuda/nccl_transport.h"

#include <nccl.h>

#include <array>
#include <compare>
#include <cstring>
#include <exception>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/reduce.h"
#include "kernels/wire/control_plane.h"

namespace qe {
namespace {

#define QE_NCCL_CHECK(call)                                                                                            \
  do {                                                                                                                 \
    const ncclResult_t qe_status = (call);                                                                             \
    if (qe_status != ncclSuccess && qe_status != ncclInProgress)                                                       \
      ::qe::cuda::fail(#call, std::string(ncclGetErrorString(qe_status)) + ", " + ncclGetLastError(nullptr), __FILE__, \
                       __LINE__);                                                                                      \
  } while (false)

// A receive that waits for its sender holds its blocks on the card, so a message gets few of them.
constexpr int kBlocksOfAMessage = 8;
constexpr double kLastWait_s = 5;  // how long a clean end waits for the other ranks

// Who shares a communicator: two ends of a directed edge, or a group by its first rank. World ranks.
struct Key {
  enum class Kind : std::uint8_t { kEdge, kWorld, kPipeline, kData } kind;
  int first;
  int second;  // receiver of an edge, else 0
  auto operator<=>(const Key&) const = default;
};

Key group_key(const RankLayout& layout, Group group) {
  return {static_cast<Key::Kind>(1 + static_cast<int>(group)), layout.world_rank_of(0, group), 0};
}

// Every communicator that a rank is part of, in one order for all ranks, so that making them cannot deadlock.
std::set<Key> keys_of(const RankLayout& layout) {
  std::set<Key> keys;
  if (layout.pipeline > 1) {
    for (const int step : {1, layout.pipeline - 1}) {
      const int self = layout.rank(Group::kPipeline);
      const int other = layout.world_rank_of((self + step) % layout.pipeline, Group::kPipeline);
      keys.insert({Key::Kind::kEdge, layout.world, other});
      keys.insert({Key::Kind::kEdge, other, layout.world});
    }
  }
  for (const Group group : {Group::kWorld, Group::kPipeline, Group::kData}) {
    if (layout.size(group) > 1) keys.insert(group_key(layout, group));
  }
  return keys;
}

class Communicator {
 public:
  // Collective over its members; not yet usable when it returns (settle).
  Communicator(const ncclUniqueId& id, int size, int rank) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = kBlocksOfAMessage;
    QE_NCCL_CHECK(ncclCommInitRankConfig(&comm_, size, id, rank, &config));
  }
  ~Communicator() {
    if (std::uncaught_exceptions() > exceptions_) abort();
    if (comm_ == nullptr) return;
    try {
      QE_NCCL_CHECK(ncclCommFinalize(comm_));
      settle(HostWait(0, kLastWait_s), "the end of NCCL");
      (void)ncclCommDestroy(comm_);
    } catch (const std::exception&) {  // another rank is gone
      abort();
    }
  }
  void abort() noexcept {
    if (comm_ != nullptr) (void)ncclCommAbort(std::exchange(comm_, nullptr));
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] ncclComm_t get() const noexcept { return comm_; }
  // The host waits until NCCL has taken what was asked of it.
  void settle(const HostWait& wait, const std::string& what) const {
    wait.until(
        [&] {
          ncclResult_t state = ncclInProgress;
          QE_NCCL_CHECK(ncclCommGetAsyncError(comm_, &state));
          QE_NCCL_CHECK(state);
          return state != ncclInProgress;
        },
        [&] { return what; });
  }

 private:
  ncclComm_t comm_ = nullptr;
  int exceptions_ = std::uncaught_exceptions();
};

class NcclTransport final : public Transport {
 public:
  NcclTransport(CudaDevice& device, std::shared_ptr<Wire> wire, RankLayout layout, const WaitRule& rule)
      : device_(device), layout_(layout), control_(std::move(wire), layout), wait_(layout.world, rule) {
    QE_EXPECTS(layout.size(Group::kWorld) > 1, "one rank needs no NCCL");
    connect();
    for (GroupScratch& s : scratch_) s.last_use = device_.make_event();
    warm_up();
    device_.set_host_waiter([this](const auto& done, const auto& what) { wait_for_card(done, what); });
  }
  ~NcclTransport() override { device_.set_host_waiter({}); }
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  [[nodiscard]] int rank(Group group) const override { return layout_.rank(group); }
  [[nodiscard]] int size(Group group) const override { return layout_.size(group); }

  void send(Stream& s, const void* data, std::size_t bytes, int peer, const Action& label) override {
    if (bytes == 0) return;
    const Communicator& comm = edge(layout_.world, layout_.world_rank_of(peer, Group::kPipeline));
    QE_NCCL_CHECK(ncclSend(data, bytes, ncclInt8, 1, comm.get(), device_.native(s)));
    comm.settle(wait_, to_string(label));
  }
  void recv(Stream& s, void* data, std::size_t bytes, int peer, const Action& label) override {
    if (bytes == 0) return;
    const Communicator& comm = edge(layout_.world_rank_of(peer, Group::kPipeline), layout_.world);
    QE_NCCL_CHECK(ncclRecv(data, bytes, ncclInt8, 0, comm.get(), device_.native(s)));
    comm.settle(wait_, to_string(label));
  }
  void all_reduce_sum(Stream& s, float* data, std::int64_t count, Group group) override {
    reduce(s, Combine::kSum, data, count, group);
  }
  void all_reduce_max(Stream& s, float* data, std::int64_t count, Group group) override {
    reduce(s, Combine::kMax, data, count, group);
  }
  void all_gather(Stream& s, const void* in, void* out, std::size_t bytes, Group group) override {
    if (size(group) == 1) {
      if (in != out) device_.copy(s, out, in, bytes);
    } else if (bytes != 0) {
      gather(s, in, out, bytes, group);
    }
  }
  void barrier(Group group) override { control_.barrier(group, wait_); }
  std::vector<std::string> exchange(const std::string& mine, Group group) override {
    return control_.exchange(mine, group, wait_);
  }

 private:
  struct GroupScratch {          // what the members gave to a reduction
    std::vector<Buffer> memory;  // the last is in use; graphs and streams may still read the others
    std::unique_ptr<Event> last_use;
  };

  // A message that never comes holds its kernel on the card, and memory could not be freed on the way out. The failure
  // is told by now: an abort may itself wait for a rank that is stopped, and then the watchdog ends this process.
  void wait_for_card(const std::function<bool()>& done, const std::function<std::string()>& what) {
    try {
      wait_.until(done, what);
    } catch (...) {
      for (auto& [key, comm] : comms_) comm.abort();
      throw;
    }
  }

  // Ids are made by the first member of each communicator and told to all.
  void connect() {
    const std::set<Key> mine = keys_of(layout_);
    std::string made;
    for (const Key& key : mine) {
      if (key.first != layout_.world) continue;
      ncclUniqueId id;
      QE_NCCL_CHECK(ncclGetUniqueId(&id));
      made.append(id.internal, sizeof id.internal);
    }
    std::map<Key, ncclUniqueId> ids;
    const std::vector<std::string> all = control_.exchange(made, Group::kWorld, wait_);
    for (int r = 0; r < size(Group::kWorld); ++r) {
      std::size_t at = 0;
      for (const Key& key : keys_of({r, layout_.pipeline, layout_.data})) {
        if (key.first != r) continue;
        std::memcpy(ids[key].internal, all[static_cast<std::size_t>(r)].data() + at, sizeof(ncclUniqueId));
        at += sizeof(ncclUniqueId);
      }
    }
    for (const Key& key : mine) {
      const auto [members, self] = place(key);
      const Communicator& comm = comms_.try_emplace(key, ids.at(key), members, self).first->second;
      comm.settle(wait_, "NCCL's communicator with rank " + std::to_string(key.first) + " as its first");
    }
  }

  // Size of a communicator and this rank's place in it.
  [[nodiscard]] std::pair<int, int> place(const Key& key) const {
    if (key.kind == Key::Kind::kEdge) return {2, key.first == layout_.world ? 0 : 1};
    const auto group = static_cast<Group>(static_cast<int>(key.kind) - 1);
    return {size(group), rank(group)};
  }

  // One message over each, so that nothing is allocated or connected in a step. Edges have streams of their own: two
  // ranks may meet on their edges in any order.
  void warm_up() {
    const Buffer memory =
        device_.allocate(static_cast<std::size_t>(2 * size(Group::kWorld)) * sizeof(float), MemoryKind::kWorkspace);
    std::vector<std::unique_ptr<Stream>> streams;
    for (const auto& [key, comm] : comms_) {
      Stream& s = *streams.emplace_back(device_.make_stream("warm-up"));
      if (key.kind != Key::Kind::kEdge) {
        QE_NCCL_CHECK(ncclAllGather(memory.data(), memory.as<float>() + size(Group::kWorld), 1, ncclFloat, comm.get(),
                                    device_.native(s)));
      } else if (key.first == layout_.world) {
        QE_NCCL_CHECK(ncclSend(memory.data(), 1, ncclFloat, 1, comm.get(), device_.native(s)));
      } else {
        QE_NCCL_CHECK(ncclRecv(memory.data(), 1, ncclFloat, 0, comm.get(), device_.native(s)));
      }
      comm.settle(wait_, "NCCL's first message");
      wait_.until([&] { return is_idle(s); }, [] { return "NCCL's first message"; });
    }
  }
  bool is_idle(Stream& s) const {
    const cudaError_t status = cudaStreamQuery(device_.native(s));
    if (status == cudaErrorNotReady) return false;
    QE_CUDA_CHECK(status);
    return true;
  }

  [[nodiscard]] const Communicator& edge(int from, int to) const {
    const auto found = comms_.find({Key::Kind::kEdge, from, to});
    if (found != comms_.end()) return found->second;
    throw ConfigError("execution.transport nccl joins neighbouring pipeline ranks, but the schedule sends from rank " +
                      std::to_string(from) + " to rank " + std::to_string(to) + "; use ipc on one host");
  }

  void gather(Stream& s, const void* in, void* out, std::size_t bytes, Group group) {
    const Communicator& comm = comms_.at(group_key(layout_, group));
    QE_NCCL_CHECK(ncclAllGather(in, out, bytes, ncclInt8, comm.get(), device_.native(s)));
    comm.settle(wait_, "all_gather");
  }

  // NCCL leaves the order of its sums open, so it only carries the parts.
  void reduce(Stream& s, Combine combine, float* data, std::int64_t count, Group group) {
    if (size(group) == 1 || count == 0) return;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
    GroupScratch& scratch = scratch_[static_cast<std::size_t>(group)];
    const std::size_t needed = bytes * static_cast<std::size_t>(size(group));
    if (scratch.memory.empty() || scratch.memory.back().bytes() < needed) {
      scratch.memory.push_back(device_.allocate(needed, MemoryKind::kWorkspace));
    }
    const auto* parts = scratch.memory.back().as<float>();
    device_.wait(s, *scratch.last_use);
    gather(s, data, scratch.memory.back().data(), bytes, group);
    std::vector<const float*> each;
    for (int i = 0; i < size(group); ++i) each.push_back(parts + i * count);
    cuda::combine_parts(device_.native(s), combine, data, each, count);
    device_.record(*scratch.last_use, s);
  }

  CudaDevice& device_;
  RankLayout layout_;
  ControlPlane control_;
  HostWait wait_;
  std::array<GroupScratch, 3> scratch_;
  std::map<Key, Communicator> comms_;
};

}  // namespace

bool nccl_was_built() noexcept { return true; }

std::unique_ptr<Transport> make_nccl_transport(CudaDevice& device, std::shared_ptr<Wire> wire, RankLayout layout,
                                               const WaitRule& rule) {
  return std::make_unique<NcclTransport>(device, std::move(wire), layout, rule);
}

}  // namespace qe
