// Which card each rank of a job drives, from what every rank sees. A pure function; asks no driver and no MPI.
#pragma once

#include <string>
#include <vector>

namespace qe {

struct VisibleCard {
  std::string uuid, pci, name;  // "…" in hex, "0000:18:00.0", "NVIDIA H200"
};
struct RankView {
  std::string host;
  std::vector<VisibleCard> cards;  // in the order of the process's ordinals
};

// One line, and back.
std::string to_text(const RankView&);
RankView parse_rank_view(const std::string&);

struct Assignment {
  std::vector<int> ordinal;  // of each rank, among the cards that it sees
  std::vector<bool> shared;  // another rank drives the same card
  [[nodiscard]] bool any_shared() const;
};

// In rank order each rank takes the card it sees that the fewest ranks took, the first of several. So ranks that all
// see all cards take one each, and a rank that was given one card of its own takes that. DeviceError when a rank sees
// none.
Assignment assign_cards(const std::vector<RankView>&);

// A line a rank: rank, host, card, PCI id, name, and with whom it is shared.
std::string assignment_table(const std::vector<RankView>&, const Assignment&);

// "ipc" or "nccl" for the wanted "auto", "ipc" or "nccl". ConfigError, with the table, when it cannot serve these
// ranks: ipc joins ranks of one host, nccl needs a card a rank and must be in the build.
std::string choose_transport(const std::string& wanted, const std::vector<RankView>&, const Assignment&,
                             bool nccl_built);

}  // namespace qe
