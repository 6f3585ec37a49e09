#include "app/card_peaks.h"

#include <array>
#include <string_view>

namespace qe {
namespace {

struct Card {
  std::string_view part;  // of the name; the first that fits counts
  CardPeaks peaks;
};
constexpr std::array kCards{Card{"H100 PCIe", {756, 1513}}, Card{"H800 PCIe", {756, 1513}},
                            Card{"H100 NVL", {835, 1671}},  Card{"H200 NVL", {835, 1671}},
                            Card{"H100", {989, 1979}},      Card{"H800", {989, 1979}},
                            Card{"H200", {989, 1979}}};

}  // namespace

std::optional<CardPeaks> peaks_of(const std::string& device) {
  for (const Card& card : kCards) {
    if (device.find(card.part) != std::string::npos) return card.peaks;
  }
  return std::nullopt;
}

}  // namespace qe
