// Owns MPI around Catch2 for tests that need a GPU: where there is none they are skipped and say so. Every rank fails
// when one does.
#define CATCH_CONFIG_RUNNER
#include <mpi.h>

#include <cstdio>

#include "kernels/cuda/device.h"
#include "tests/catch.h"

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  int skipped = qe::CudaDevice::count() == 0 ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &skipped, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  int failed = 0;
  if (skipped != 0) {
    std::puts("skipped: needs a CUDA device, and there is none");
  } else {
    failed = Catch::Session().run(argc, argv) != 0 ? 1 : 0;
  }
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return failed;
}
