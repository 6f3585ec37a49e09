#include "kernels/wire/wire.h"

namespace qe {

Channel stream_channel(Group g) noexcept {
  return static_cast<Channel>(static_cast<int>(Channel::kWorldStream) + static_cast<int>(g));
}
Channel control_channel(Group g) noexcept {
  return static_cast<Channel>(static_cast<int>(Channel::kWorldControl) + static_cast<int>(g));
}

const char* name_of(Group group) noexcept {
  switch (group) {
    case Group::kWorld:
      return "world";
    case Group::kPipeline:
      return "pipeline";
    case Group::kData:
      return "data";
  }
  return "?";
}

DeviceError size_mismatch(int rank, const std::string& what, const std::string& found, std::size_t expected) {
  return DeviceError("rank " + std::to_string(rank) + ": " + what + " carries " + found + " bytes where " +
                     std::to_string(expected) +
                     " are expected, so the two ranks run different lists or shapes; give every rank the same config");
}

int RankLayout::rank(Group group) const noexcept {
  switch (group) {
    case Group::kWorld:
      return world;
    case Group::kPipeline:
      return world % pipeline;
    case Group::kData:
      return world / pipeline;
  }
  return 0;
}

int RankLayout::size(Group group) const noexcept {
  switch (group) {
    case Group::kWorld:
      return pipeline * data;
    case Group::kPipeline:
      return pipeline;
    case Group::kData:
      return data;
  }
  return 0;
}

int RankLayout::world_rank_of(int member, Group group) const noexcept {
  switch (group) {
    case Group::kWorld:
      return member;
    case Group::kPipeline:
      return rank(Group::kData) * pipeline + member;
    case Group::kData:
      return member * pipeline + rank(Group::kPipeline);
  }
  return 0;
}

}  // namespace qe
