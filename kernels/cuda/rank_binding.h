// Binds this rank to one of the cards that it sees. Asks the driver and the other ranks; the choice itself is
// kernels/wire/device_assignment.h. Makes no context.
#pragma once

#include <optional>
#include <string>

#include "kernels/wire/host_wait.h"

namespace qe {

struct CardBinding {
  int ordinal;
  std::string transport;  // "ipc" or "nccl"; "none" for one rank
  std::string table;      // a line a rank
};

// Collective over an MPI job of pipeline · data ranks; one rank needs no MPI. `transport`: "auto", "ipc" or "nccl".
// Nothing when no rank sees a card and none is `required`. ConfigError when the job has another size; AgreedError when
// some ranks see cards and others do not, when the transport cannot serve these ranks, or when a required card is
// missing.
std::optional<CardBinding> bind_to_card(const std::string& transport, int pipeline, int data, const WaitRule&,
                                        bool required);

}  // namespace qe
