// Destinations, ledger half: exactly one write per gradient, microbatch and step.
#include "core/qeffect/grad_ledger.h"

#include "tests/contract/harness.h"

using namespace qe;
using namespace qe::contract_test;

namespace {
GradLedger two_matrices() { return {StageIndex{1}, GradKind::kMatrix, 2, 4}; }
}  // namespace

TEST_CASE("a duplicate gradient write is rejected, open or done") {
  GradLedger ledger = two_matrices();
  ledger.begin(1, parse_action("1W2"));
  const ViolationReport open = refused([&] { ledger.begin(1, parse_action("1W2")); });
  CHECK(open.relation == Violation::kDestination);
  CHECK(open.operation == "begin(1W2)");
  CHECK(open.key == "stage 1, matrix 1, microbatch 2");
  CHECK(open.expected == "one write per gradient and step");
  CHECK(open.found == "a second write while the first is open");
  ledger.commit(1, parse_action("1W2"));
  const ViolationReport done = refused([&] { ledger.begin(1, parse_action("1W0x4")); });
  CHECK(done.key == "stage 1, matrix 1, microbatch 2");
  CHECK(done.found == "a duplicate write");
  CHECK(ledger.open() == 0);  // the refused group opened none of its cells
  ledger.begin(1, parse_action("1W0x2"));
  CHECK(ledger.open() == 2);
}

TEST_CASE("a write that was not begun cannot be committed") {
  GradLedger ledger = two_matrices();
  const ViolationReport r = refused([&] { ledger.commit(0, parse_action("1W3")); });
  CHECK(r.relation == Violation::kDestination);
  CHECK(r.operation == "commit(1W3)");
  CHECK(r.key == "stage 1, matrix 0, microbatch 3");
  CHECK(r.found == "no open write");
}

TEST_CASE("a gradient that does not exist is refused") {
  GradLedger ledger = two_matrices();
  for (const auto& [matrix, action] : std::vector<std::pair<int, std::string>>{
           {2, "1W0"}, {-1, "1W0"}, {0, "1W4"}, {0, "1W3x2"}, {0, "1W1x2147483647"}}) {
    const ViolationReport r = refused([&, m = matrix, a = action] { ledger.begin(m, parse_action(a)); });
    CHECK(r.relation == Violation::kDestination);
    CHECK(r.found == "a gradient that does not exist");
  }
  CHECK(ledger.open() == 0);
}

TEST_CASE("completeness names the first missing microbatch and gradient") {
  GradLedger ledger = two_matrices();
  for (const char* action : {"1W0", "1W1", "1W2x2"}) {
    ledger.begin(0, parse_action(action));
    ledger.commit(0, parse_action(action));
  }
  ledger.begin(1, parse_action("1W0"));
  ledger.commit(1, parse_action("1W0"));
  ledger.begin(1, parse_action("1W1"));  // open is not written
  const ViolationReport r = refused([&] { ledger.require_complete("finalize_step", Violation::kCommit); });
  CHECK(r.relation == Violation::kCommit);
  CHECK(r.key == "stage 1, matrix 1, microbatch 1");
  CHECK(r.found == "missing W");
  ledger.commit(1, parse_action("1W1"));
  ledger.begin(1, parse_action("1W2x2"));
  ledger.commit(1, parse_action("1W2x2"));
  ledger.require_complete("finalize_step", Violation::kCommit);
  ledger.start_epoch();
  CHECK_THROWS_AS(ledger.require_complete("finalize_step", Violation::kCommit), ContractViolation);
}

TEST_CASE("an aborted ledger takes no write and no commit until its epoch starts again") {
  GradLedger ledger(StageIndex{0}, GradKind::kVector, 1, 2);
  ledger.begin(0, parse_action("0I0"));
  ledger.abort();
  const ViolationReport commit = refused([&] { ledger.commit(0, parse_action("0I0")); });
  CHECK(commit.relation == Violation::kRebuild);
  CHECK(commit.key == "stage 0, vector 0, microbatch 0");
  const ViolationReport begin = refused([&] { ledger.begin(0, parse_action("0I1")); });
  CHECK(begin.relation == Violation::kRebuild);
  CHECK(begin.operation == "begin(0I1)");
  CHECK(begin.expected == "gradient memory rebuilt after the aborted write");
  CHECK(begin.found == "gradient memory of an aborted epoch");
  ledger.start_epoch();
  for (const char* action : {"0I0", "0I1"}) {
    ledger.begin(0, parse_action(action));
    ledger.commit(0, parse_action(action));
  }
  ledger.require_complete("finalize_step", Violation::kCommit);
}
