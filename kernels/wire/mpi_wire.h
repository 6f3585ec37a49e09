// The wire between the processes of an MPI job. Owns a duplicate of MPI_COMM_WORLD; MPI_Init and MPI_Finalize are the
// caller's.
#pragma once

#include <memory>

#include "kernels/wire/wire.h"

namespace qe {

struct MpiWorld {
  std::shared_ptr<Wire> wire;
  RankLayout layout;
};

// Collective. ConfigError when the job has not pipeline · data ranks. The wire must be destroyed before MPI_Finalize;
// it is used by one thread, so MPI_THREAD_FUNNELED is enough.
MpiWorld join_mpi_world(int pipeline, int data);

// For a world of one rank, which needs no MPI: ConfigError when this process is one of several in an MPI job.
void expect_no_other_ranks();

}  // namespace qe
