// MPI as a wire. A message is MPI_BYTE in pieces of at most 1 GiB under one tag; the tag holds the channel and the low
// bits of the sequence number, and MPI keeps the order of equal tags. Reductions are made of such messages too, because
// MPI_Allreduce leaves the order of its sum open.
#include "kernels/wire/mpi_wire.h"

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <list>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"

namespace qe {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 30;
constexpr auto kLastSends = std::chrono::seconds(5);  // how long a clean end waits for its last sends

void check_mpi(int code, const char* call, const char* file, int line) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw DeviceError(std::string(file) + ":" + std::to_string(line) + ": " + call +
                    " failed: " + std::string(text, static_cast<std::size_t>(length)));
}
#define QE_MPI_CHECK(call) check_mpi(call, #call, __FILE__, __LINE__)

// Calls f(offset, bytes) for each piece; an empty message is one empty piece.
template <class F>
void for_each_piece(std::size_t bytes, F&& f) {
  std::size_t offset = 0;
  do {
    const std::size_t piece = std::min(kPiece, bytes - offset);
    f(offset, static_cast<int>(piece));
    offset += piece;
  } while (offset < bytes);
}

bool is_truncation(int code) {
  int kind = MPI_SUCCESS;
  MPI_Error_class(code, &kind);
  return kind == MPI_ERR_TRUNCATE;
}

struct Outgoing {
  std::vector<std::byte> payload;
  std::vector<MPI_Request> requests;
};

class MpiReceive final : public Receive {
 public:
  MpiReceive(MPI_Comm comm, int rank, int from, int tag, void* data, std::size_t bytes, std::string what)
      : rank_(rank), bytes_(bytes), what_(std::move(what)) {
    for_each_piece(bytes, [&](std::size_t offset, int piece) {
      requests_.push_back(MPI_REQUEST_NULL);
      QE_MPI_CHECK(
          MPI_Irecv(static_cast<std::byte*>(data) + offset, piece, MPI_BYTE, from, tag, comm, &requests_.back()));
    });
  }
  ~MpiReceive() override {
    for (MPI_Request& request : requests_) {
      if (request == MPI_REQUEST_NULL) continue;
      MPI_Cancel(&request);
      MPI_Request_free(&request);
    }
  }
  MpiReceive(const MpiReceive&) = delete;
  MpiReceive& operator=(const MpiReceive&) = delete;

  bool done() override {
    for (; arrived_ < requests_.size(); ++arrived_) {
      int flag = 0;
      MPI_Status status;
      const int code = MPI_Test(&requests_[arrived_], &flag, &status);
      if (code != MPI_SUCCESS && is_truncation(code))
        throw size_mismatch(rank_, what_, "more than " + std::to_string(bytes_), bytes_);
      QE_MPI_CHECK(code);
      if (flag == 0) return false;
      int count = 0;
      QE_MPI_CHECK(MPI_Get_count(&status, MPI_BYTE, &count));
      received_ += static_cast<std::size_t>(count);
    }
    if (received_ != bytes_) throw size_mismatch(rank_, what_, std::to_string(received_), bytes_);
    return true;
  }

 private:
  int rank_;
  std::size_t bytes_;
  std::string what_;
  std::vector<MPI_Request> requests_;
  std::size_t arrived_ = 0;
  std::size_t received_ = 0;
};

class MpiWire final : public Wire {
 public:
  MpiWire() {
    QE_MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &comm_));
    QE_MPI_CHECK(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    QE_MPI_CHECK(MPI_Comm_rank(comm_, &rank_));
    int* upper = nullptr;
    int found = 0;
    QE_MPI_CHECK(MPI_Comm_get_attr(comm_, MPI_TAG_UB, &upper, &found));
    tags_ = (found != 0 ? *upper : 32767) / kChannels;
  }

  // After an exception the job is about to be aborted: nothing is waited for, and payloads that MPI may still read
  // stay.
  ~MpiWire() override {
    const auto until = std::chrono::steady_clock::now() + kLastSends;
    const bool failing = std::uncaught_exceptions() > exceptions_;
    reap();
    while (!failing && !outgoing_.empty() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      reap();
    }
    if (!outgoing_.empty()) {
      [[maybe_unused]] const auto* left_to_mpi = new std::list<Outgoing>(std::move(outgoing_));
    } else if (!failing) {
      MPI_Comm_free(&comm_);
    }
  }
  MpiWire(const MpiWire&) = delete;
  MpiWire& operator=(const MpiWire&) = delete;

  [[nodiscard]] int rank() const noexcept { return rank_; }

  void post(const Address& to, const void* data, std::size_t bytes) override {
    reap();
    const auto* from = static_cast<const std::byte*>(data);
    Outgoing& message = outgoing_.emplace_back(Outgoing{std::vector<std::byte>(from, from + bytes), {}});
    for_each_piece(bytes, [&](std::size_t offset, int piece) {
      message.requests.push_back(MPI_REQUEST_NULL);
      QE_MPI_CHECK(MPI_Isend(message.payload.data() + offset, piece, MPI_BYTE, to.peer, tag_of(to), comm_,
                             &message.requests.back()));
    });
  }

  std::unique_ptr<Receive> expect(const Address& from, void* data, std::size_t bytes, std::string what) override {
    return std::make_unique<MpiReceive>(comm_, rank_, from.peer, tag_of(from), data, bytes, std::move(what));
  }

 private:
  [[nodiscard]] int tag_of(const Address& a) const {
    return static_cast<int>(a.channel) * tags_ + static_cast<int>(a.sequence % static_cast<std::uint64_t>(tags_));
  }
  void reap() {  // forgets the sends that are over
    std::erase_if(outgoing_, [](Outgoing& message) {
      int all = 0;
      MPI_Testall(static_cast<int>(message.requests.size()), message.requests.data(), &all, MPI_STATUSES_IGNORE);
      return all != 0;
    });
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int tags_ = 0;  // a channel
  std::list<Outgoing> outgoing_;
  int exceptions_ = std::uncaught_exceptions();
};

void expect_ranks(int pipeline, int data) {
  int ranks = 0;
  QE_MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
  if (ranks == pipeline * data) return;
  throw ConfigError("pipeline.pipeline_model_parallel_size " + std::to_string(pipeline) + " times parallel.data " +
                    std::to_string(data) + " need " + std::to_string(pipeline * data) + " ranks, got " +
                    std::to_string(ranks) + "; start with mpirun -n " + std::to_string(pipeline * data));
}

}  // namespace

MpiWorld join_mpi_world(int pipeline, int data) {
  expect_ranks(pipeline, data);
  auto wire = std::make_shared<MpiWire>();
  const RankLayout layout{wire->rank(), pipeline, data};
  return {std::move(wire), layout};
}

void expect_no_other_ranks() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized != 0 && finalized == 0) expect_ranks(1, 1);
}

}  // namespace qe
