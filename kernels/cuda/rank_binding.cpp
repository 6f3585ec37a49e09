#include "kernels/cuda/rank_binding.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cuda/check.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/nccl_transport.h"
#include "kernels/wire/control_plane.h"
#include "kernels/wire/device_assignment.h"
#include "kernels/wire/mpi_wire.h"
#include "kernels/wire/process.h"

namespace qe {
namespace {

std::string hex(const cudaUUID_t& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : uuid.bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

RankView visible_cards() {
  RankView view{host_name(), {}};
  const int count = CudaDevice::count();
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    char pci[32] = {};
    QE_CUDA_CHECK(cudaGetDeviceProperties(&properties, i));
    QE_CUDA_CHECK(cudaDeviceGetPCIBusId(pci, sizeof pci, i));
    view.cards.push_back({hex(properties.uuid), pci, properties.name});
  }
  return view;
}

struct Views {
  std::vector<RankView> ranks;
  int self = 0;
};

Views exchange_views(int pipeline, int data, const WaitRule& rule) {
  if (pipeline * data == 1) {
    expect_no_other_ranks();
    return {{visible_cards()}};
  }
  MpiWorld world = join_mpi_world(pipeline, data);
  ControlPlane control(std::move(world.wire), world.layout);
  Views views{{}, world.layout.world};
  for (const std::string& text :
       control.exchange(to_text(visible_cards()), Group::kWorld, HostWait(world.layout.world, rule))) {
    views.ranks.push_back(parse_rank_view(text));
  }
  return views;
}

std::optional<CardBinding> binding_of(const Views& views, const std::string& transport, bool required) {
  const auto sees_none = [](const RankView& view) { return view.cards.empty(); };
  const auto blind = std::find_if(views.ranks.begin(), views.ranks.end(), sees_none);
  if (!required && blind != views.ranks.end()) {
    if (std::all_of(views.ranks.begin(), views.ranks.end(), sees_none)) return std::nullopt;
    throw ConfigError("execution.backend auto: rank " + std::to_string(blind - views.ranks.begin()) + " on " +
                      blind->host + " sees no CUDA device and others do; set execution.backend to cpu or cuda");
  }
  const Assignment assignment = assign_cards(views.ranks);
  const int ordinal = assignment.ordinal.at(static_cast<std::size_t>(views.self));
  const std::string kind =
      views.ranks.size() == 1 ? "none" : choose_transport(transport, views.ranks, assignment, nccl_was_built());
  return CardBinding{ordinal, kind, assignment_table(views.ranks, assignment)};
}

}  // namespace

std::optional<CardBinding> bind_to_card(const std::string& transport, int pipeline, int data, const WaitRule& rule,
                                        bool required) {
  const Views views = exchange_views(pipeline, data, rule);
  try {
    return binding_of(views, transport, required);
  } catch (const Error& e) {  // every rank has the same views
    throw AgreedError(e.exit_code(), e.what());
  }
}

}  // namespace qe
