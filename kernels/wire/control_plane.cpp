#include "kernels/wire/control_plane.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace qe {

ControlPlane::ControlPlane(std::shared_ptr<Wire> wire, RankLayout layout) : wire_(std::move(wire)), layout_(layout) {}

void ControlPlane::gather(std::string_view mine, std::vector<std::string>& all, Group group, const char* name,
                          const HostWait& wait) {
  const std::uint64_t sequence = next_[static_cast<std::size_t>(group)]++;
  const int self = layout_.rank(group);
  const std::string what = std::string(name) + " over the " + name_of(group) + " group";
  std::vector<std::unique_ptr<Receive>> receives(all.size());
  for (int i = 0; i < layout_.size(group); ++i) {
    if (i == self) continue;
    std::string& text = all[static_cast<std::size_t>(i)];
    const Address peer{layout_.world_rank_of(i, group), control_channel(group), sequence};
    wire_->post(peer, mine.data(), mine.size());
    receives[static_cast<std::size_t>(i)] =
        wire_->expect(peer, text.data(), text.size(), what + " from rank " + std::to_string(peer.peer));
  }
  all[static_cast<std::size_t>(self)] = mine;
  const auto missing = [&] {
    return std::find_if(receives.begin(), receives.end(), [](auto& r) { return r != nullptr; }) - receives.begin();
  };
  wait.until(
      [&] {
        for (auto& receive : receives) {
          if (receive != nullptr && receive->done()) receive.reset();
        }
        return missing() == std::ssize(receives);
      },
      [&] { return what + ", of rank " + std::to_string(layout_.world_rank_of(static_cast<int>(missing()), group)); });
}

void ControlPlane::barrier(Group group, const HostWait& wait) {
  std::vector<std::string> all(static_cast<std::size_t>(layout_.size(group)));
  gather({}, all, group, "barrier", wait);
}

// Two rounds: the sizes, then the texts.
std::vector<std::string> ControlPlane::exchange(const std::string& mine, Group group, const HostWait& wait) {
  std::uint64_t bytes = mine.size();
  std::string header(sizeof bytes, '\0');
  std::memcpy(header.data(), &bytes, sizeof bytes);
  std::vector<std::string> all(static_cast<std::size_t>(layout_.size(group)), header);
  gather(header, all, group, "exchange of sizes", wait);
  for (std::string& text : all) {
    std::memcpy(&bytes, text.data(), sizeof bytes);
    text.resize(bytes);
  }
  gather(mine, all, group, "exchange", wait);
  return all;
}

}  // namespace qe
