#include "kernels/cpu/mpi_transport.h"

#include <utility>

#include "kernels/cpu/message_transport.h"
#include "kernels/wire/mpi_wire.h"

namespace qe {

std::unique_ptr<Transport> make_mpi_transport(CpuDevice& device, int pipeline, int data, const WaitRule& rule) {
  MpiWorld world = join_mpi_world(pipeline, data);
  return std::make_unique<MessageTransport>(device, std::move(world.wire), world.layout, rule);
}

}  // namespace qe
