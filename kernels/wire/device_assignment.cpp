#include "kernels/wire/device_assignment.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "core/error.h"

namespace qe {
namespace {

constexpr char kField = '\t';

const VisibleCard& card_of(const std::vector<RankView>& ranks, const Assignment& a, std::size_t r) {
  return ranks[r].cards[static_cast<std::size_t>(a.ordinal[r])];
}

}  // namespace

std::string to_text(const RankView& view) {
  std::string text = view.host;
  for (const VisibleCard& c : view.cards) text += kField + c.uuid + kField + c.pci + kField + c.name;
  return text;
}

RankView parse_rank_view(const std::string& text) {
  std::istringstream fields(text);
  RankView view;
  std::getline(fields, view.host, kField);
  VisibleCard card;
  while (std::getline(fields, card.uuid, kField) && std::getline(fields, card.pci, kField) &&
         std::getline(fields, card.name, kField)) {
    view.cards.push_back(card);
  }
  return view;
}

bool Assignment::any_shared() const { return std::find(shared.begin(), shared.end(), true) != shared.end(); }

Assignment assign_cards(const std::vector<RankView>& ranks) {
  std::map<std::pair<std::string, std::string>, int> users;  // of (host, card)
  Assignment a;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const RankView& view = ranks[r];
    if (view.cards.empty()) {
      throw DeviceError("rank " + std::to_string(r) + " on " + view.host +
                        " sees no CUDA device; check CUDA_VISIBLE_DEVICES and the driver there, or set "
                        "execution.backend to cpu");
    }
    const auto load = [&](const VisibleCard& c) { return users[{view.host, c.uuid}]; };
    const auto best = std::min_element(view.cards.begin(), view.cards.end(),
                                       [&](const VisibleCard& x, const VisibleCard& y) { return load(x) < load(y); });
    ++users[{view.host, best->uuid}];
    a.ordinal.push_back(static_cast<int>(best - view.cards.begin()));
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    a.shared.push_back(users[{ranks[r].host, card_of(ranks, a, r).uuid}] > 1);
  }
  return a;
}

std::string assignment_table(const std::vector<RankView>& ranks, const Assignment& a) {
  std::string table;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const VisibleCard& card = card_of(ranks, a, r);
    if (r > 0) table += '\n';
    table += "rank " + std::to_string(r) + "  " + ranks[r].host + "  GPU " + std::to_string(a.ordinal[r]) + "  " +
             card.pci + "  " + card.name;
    for (std::size_t other = 0; a.shared[r] && other < ranks.size(); ++other) {
      if (other == r || ranks[other].host != ranks[r].host || card_of(ranks, a, other).uuid != card.uuid) continue;
      table += "  shared with rank " + std::to_string(other);
    }
  }
  return table;
}

std::string choose_transport(const std::string& wanted, const std::vector<RankView>& ranks, const Assignment& a,
                             bool nccl_built) {
  const auto refuse = [&](const std::string& why) {
    throw ConfigError("execution.transport " + wanted + ": " + why + "\n" + assignment_table(ranks, a));
  };
  const bool one_host =
      std::all_of(ranks.begin(), ranks.end(), [&](const RankView& view) { return view.host == ranks.front().host; });
  if (wanted != "auto" && wanted != "ipc" && wanted != "nccl")
    refuse("not for the CUDA backend; use auto, ipc or nccl");
  if (wanted == "ipc" && !one_host) refuse("ipc joins the ranks of one host, and these are on several; use nccl");
  if (wanted == "ipc" || (wanted == "auto" && one_host)) return "ipc";
  if (!nccl_built) {
    refuse(
        "this build has no NCCL; build where NCCL is installed (NCCL_ROOT), or start all ranks on one host with ipc");
  }
  if (a.any_shared()) {
    refuse(
        "nccl needs a GPU of its own for every rank; start fewer ranks, show them more GPUs, or use ipc on one host");
  }
  return "nccl";
}

}  // namespace qe
