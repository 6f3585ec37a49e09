// The messages as items of a stream, and the reductions that are made of them.
#include "kernels/cpu/message_transport.h"

#include <cstring>
#include <utility>

namespace qe {
namespace {

class SendItem final : public Pending {
 public:
  SendItem(std::shared_ptr<Wire> wire, Address to, const void* data, std::size_t bytes, const Action& label)
      : wire_(std::move(wire)), to_(to), data_(data), bytes_(bytes), label_(label) {}
  void start() override { wire_->post(to_, data_, bytes_); }
  bool poll() override { return true; }  // the wire holds a copy
  [[nodiscard]] bool is_obligation() const override { return true; }
  [[nodiscard]] std::string describe() const override {
    return to_string(label_) + " (" + std::to_string(bytes_) + " bytes) to rank " + std::to_string(to_.peer);
  }

 private:
  std::shared_ptr<Wire> wire_;
  Address to_;
  const void* data_;
  std::size_t bytes_;
  Action label_;
};

class RecvItem final : public Pending {
 public:
  RecvItem(std::shared_ptr<Wire> wire, Address from, void* data, std::size_t bytes, const Action& label)
      : wire_(std::move(wire)), from_(from), data_(data), bytes_(bytes), label_(label) {}
  void start() override { receive_ = wire_->expect(from_, data_, bytes_, describe()); }
  bool poll() override { return receive_->done(); }
  [[nodiscard]] bool is_obligation() const override { return false; }
  [[nodiscard]] std::string describe() const override {
    return to_string(label_) + " (" + std::to_string(bytes_) + " bytes) from rank " + std::to_string(from_.peer);
  }

 private:
  std::shared_ptr<Wire> wire_;
  Address from_;
  void* data_;
  std::size_t bytes_;
  Action label_;
  std::unique_ptr<Receive> receive_;  // goes before its wire
};

// Every member's contribution to every member. What happens with them is decided by finish().
class GatherItem : public Pending {
 public:
  // out[i] receives bytes[i] of member i; the entry of this rank is ignored.
  GatherItem(GatherArgs args, const void* in, std::size_t in_bytes)
      : args_(std::move(args)), in_(in), in_bytes_(in_bytes) {}

  bool poll() override {
    bool all = true;
    for (auto& receive : receives_) {
      if (receive == nullptr) continue;
      if (receive->done()) {
        receive.reset();
      } else {
        all = false;
      }
    }
    if (all && !finished_) finish();
    finished_ = finished_ || all;
    return all;
  }
  [[nodiscard]] bool is_obligation() const override { return true; }
  [[nodiscard]] std::string describe() const override {
    std::string text = args_.what;
    const char* separator = ", of rank ";
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      if (receives_[i] == nullptr) continue;
      text += separator + std::to_string(args_.members[i]);
      separator = ", ";
    }
    return text;
  }

 protected:
  // Call from start().
  void contribute(const std::vector<void*>& out, const std::vector<std::size_t>& bytes) {
    receives_.resize(args_.members.size());
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      if (static_cast<int>(i) == args_.self) continue;
      const Address peer{args_.members[i], args_.channel, args_.sequence};
      args_.wire->post(peer, in_, in_bytes_);
      receives_[i] = args_.wire->expect(peer, out[i], bytes[i], args_.what + " from rank " + std::to_string(peer.peer));
    }
  }
  virtual void finish() {}

  GatherArgs args_;
  const void* in_;
  std::size_t in_bytes_;

 private:
  std::vector<std::unique_ptr<Receive>> receives_;  // null: own, or arrived
  bool finished_ = false;
};

class AllGatherItem final : public GatherItem {
 public:
  AllGatherItem(GatherArgs args, const void* in, std::size_t in_bytes, std::vector<void*> out,
                std::vector<std::size_t> bytes)
      : GatherItem(std::move(args), in, in_bytes), out_(std::move(out)), bytes_(std::move(bytes)) {}
  void start() override {
    if (in_bytes_ != 0) std::memmove(out_[static_cast<std::size_t>(args_.self)], in_, in_bytes_);
    contribute(out_, bytes_);
  }

 private:
  std::vector<void*> out_;
  std::vector<std::size_t> bytes_;
};

enum class Combine : std::uint8_t { kSum, kMax };

class ReduceItem final : public GatherItem {
 public:
  ReduceItem(GatherArgs args, float* data, std::size_t count, Combine combine)
      : GatherItem(std::move(args), data, count * sizeof(float)), data_(data), count_(count), combine_(combine) {}

  void start() override {
    parts_.resize(args_.members.size());
    std::vector<void*> out;
    for (auto& part : parts_) {
      part.resize(count_);
      out.push_back(part.data());
    }
    parts_[static_cast<std::size_t>(args_.self)].assign(data_, data_ + count_);
    contribute(out, std::vector<std::size_t>(parts_.size(), in_bytes_));
  }

 private:
  // Rank 0, 1, 2, … on every rank: equal bits everywhere. A NaN of any rank wins a maximum.
  void finish() override {
    for (std::size_t i = 0; i < count_; ++i) {
      float total = parts_[0][i];
      for (std::size_t r = 1; r < parts_.size(); ++r) {
        const float x = parts_[r][i];
        if (combine_ == Combine::kSum) {
          total += x;
        } else if (x > total || x != x) {
          total = x;
        }
      }
      data_[i] = total;
    }
    parts_.clear();
  }

  float* data_;
  std::size_t count_;
  Combine combine_;
  std::vector<std::vector<float>> parts_;  // [members][count]
};

}  // namespace

MessageTransport::MessageTransport(CpuDevice& device, std::shared_ptr<Wire> wire, RankLayout layout,
                                   const WaitRule& rule)
    : device_(device),
      wire_(std::move(wire)),
      layout_(layout),
      next_send_(static_cast<std::size_t>(layout.pipeline)),
      next_recv_(static_cast<std::size_t>(layout.pipeline)) {
  device_.set_owner("rank " + std::to_string(layout.world));
  device_.set_host_wait(HostWait(layout.world, rule));
}

void MessageTransport::send(Stream& s, const void* data, std::size_t bytes, int peer, const Action& label) {
  QE_EXPECTS(peer >= 0 && peer < layout_.pipeline && peer != rank(Group::kPipeline), "a message needs another rank");
  const std::uint64_t sequence = next_send_[static_cast<std::size_t>(peer)]++;
  const Address to{layout_.world_rank_of(peer, Group::kPipeline), Channel::kPoint, sequence};
  device_.enqueue_message(s, std::make_unique<SendItem>(wire_, to, data, bytes, label));
}

void MessageTransport::recv(Stream& s, void* data, std::size_t bytes, int peer, const Action& label) {
  QE_EXPECTS(peer >= 0 && peer < layout_.pipeline && peer != rank(Group::kPipeline), "a message needs another rank");
  const std::uint64_t sequence = next_recv_[static_cast<std::size_t>(peer)]++;
  const Address from{layout_.world_rank_of(peer, Group::kPipeline), Channel::kPoint, sequence};
  device_.enqueue_message(s, std::make_unique<RecvItem>(wire_, from, data, bytes, label));
}

GatherArgs MessageTransport::gather_args(Channel channel, Group group, const char* name) {
  const std::uint64_t sequence = next_[static_cast<std::size_t>(channel)]++;
  GatherArgs args{wire_, {}, rank(group), channel, sequence, {}};
  for (int i = 0; i < size(group); ++i) args.members.push_back(layout_.world_rank_of(i, group));
  args.what = std::string(name) + " " + std::to_string(sequence) + " over the " + name_of(group) + " group";
  return args;
}

void MessageTransport::all_reduce_sum(Stream& s, float* data, std::int64_t count, Group group) {
  if (size(group) == 1) return;
  device_.enqueue_message(s, std::make_unique<ReduceItem>(gather_args(stream_channel(group), group, "all_reduce_sum"),
                                                          data, static_cast<std::size_t>(count), Combine::kSum));
}

void MessageTransport::all_reduce_max(Stream& s, float* data, std::int64_t count, Group group) {
  if (size(group) == 1) return;
  device_.enqueue_message(s, std::make_unique<ReduceItem>(gather_args(stream_channel(group), group, "all_reduce_max"),
                                                          data, static_cast<std::size_t>(count), Combine::kMax));
}

void MessageTransport::all_gather(Stream& s, const void* in, void* out, std::size_t bytes, Group group) {
  std::vector<void*> parts;
  for (int i = 0; i < size(group); ++i)
    parts.push_back(static_cast<std::byte*>(out) + static_cast<std::size_t>(i) * bytes);
  std::vector<std::size_t> sizes(parts.size(), bytes);
  device_.enqueue_message(s, std::make_unique<AllGatherItem>(gather_args(stream_channel(group), group, "all_gather"),
                                                             in, bytes, std::move(parts), std::move(sizes)));
}

void MessageTransport::gather_now(std::string_view mine, std::vector<std::string>& all, Group group, const char* name) {
  std::vector<void*> out;
  std::vector<std::size_t> sizes;
  for (std::string& text : all) {
    out.push_back(text.data());
    sizes.push_back(text.size());
  }
  AllGatherItem item(gather_args(control_channel(group), group, name), mine.data(), mine.size(), std::move(out),
                     std::move(sizes));
  item.start();
  device_.wait_until([&] { return item.poll(); }, [&] { return item.describe(); });
}

void MessageTransport::barrier(Group group) {
  std::vector<std::string> all(static_cast<std::size_t>(size(group)));
  gather_now({}, all, group, "barrier");
}

// Two rounds: the sizes, then the texts.
std::vector<std::string> MessageTransport::exchange(const std::string& mine, Group group) {
  std::uint64_t bytes = mine.size();
  std::string header(sizeof bytes, '\0');
  std::memcpy(header.data(), &bytes, sizeof bytes);
  std::vector<std::string> all(static_cast<std::size_t>(size(group)), header);
  gather_now(header, all, group, "exchange of sizes");
  for (std::string& text : all) {
    std::memcpy(&bytes, text.data(), sizeof bytes);
    text.resize(bytes);
  }
  gather_now(mine, all, group, "exchange");
  return all;
}

}  // namespace qe
