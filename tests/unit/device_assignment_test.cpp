// Which rank drives which card, for every way in which launchers show cards to ranks.
#include "kernels/wire/device_assignment.h"

#include "core/error.h"
#include "tests/catch.h"

using qe::assign_cards;
using qe::Assignment;
using qe::choose_transport;
using qe::RankView;
using qe::VisibleCard;

namespace {

VisibleCard card(int i) { return {"uuid-" + std::to_string(i), "0000:0" + std::to_string(i) + ":00.0", "NVIDIA H200"}; }
RankView sees(const std::string& host, const std::vector<int>& cards) {
  RankView view{host, {}};
  for (const int i : cards) view.cards.push_back(card(i));
  return view;
}

}  // namespace

TEST_CASE("ranks that all see all cards take one each, in rank order, host by host") {
  CHECK(assign_cards({sees("a", {0, 1}), sees("a", {0, 1})}).ordinal == std::vector<int>{0, 1});
  CHECK(assign_cards({sees("a", {0, 1, 2, 3}), sees("a", {0, 1, 2, 3})}).ordinal == std::vector<int>{0, 1});
  const Assignment two_hosts =
      assign_cards({sees("a", {0, 1}), sees("a", {0, 1}), sees("b", {0, 1}), sees("b", {0, 1})});
  CHECK(two_hosts.ordinal == std::vector<int>{0, 1, 0, 1});
  CHECK_FALSE(two_hosts.any_shared());
}

TEST_CASE("a rank that was given one card takes it, by its UUID and not by its number") {
  const Assignment own = assign_cards({sees("a", {0}), sees("a", {1})});
  CHECK(own.ordinal == std::vector<int>{0, 0});
  CHECK_FALSE(own.any_shared());
  const Assignment same = assign_cards({sees("a", {5}), sees("a", {5})});
  CHECK(same.ordinal == std::vector<int>{0, 0});
  CHECK(same.any_shared());
  // Reversed lists: the same two cards under other numbers.
  CHECK(assign_cards({sees("a", {0, 1}), sees("a", {0, 1}), sees("a", {1, 0})}).ordinal == std::vector<int>{0, 1, 0});
  CHECK(assign_cards({sees("a", {0, 1}), sees("a", {1, 0})}).any_shared() == false);
}

TEST_CASE("more ranks than cards share them evenly, also when a list names a card twice") {
  const std::vector<RankView> four(4, sees("a", {0, 1}));
  const Assignment a = assign_cards(four);
  CHECK(a.ordinal == std::vector<int>{0, 1, 0, 1});
  CHECK(a.shared == std::vector<bool>{true, true, true, true});
  CHECK(assign_cards({sees("a", {0, 0}), sees("a", {0, 0})}).any_shared());
  CHECK(assign_cards({sees("a", {0, 1}), sees("a", {0, 1}), sees("a", {0, 1})}).shared ==
        std::vector<bool>{true, false, true});
}

TEST_CASE("a rank that sees no card is named with its host") {
  REQUIRE_THROWS_WITH(assign_cards({sees("a", {0}), sees("b", {})}), ContainsSubstring("rank 1 on b"));
}

TEST_CASE("auto is ipc on one host and nccl on several") {
  const std::vector<RankView> one(2, sees("a", {0}));
  CHECK(choose_transport("auto", one, assign_cards(one), false) == "ipc");
  const std::vector<RankView> two{sees("a", {0}), sees("b", {0})};
  CHECK(choose_transport("auto", two, assign_cards(two), true) == "nccl");
  REQUIRE_THROWS_AS(choose_transport("auto", two, assign_cards(two), false), qe::ConfigError);
}

TEST_CASE("what a transport cannot serve is refused with the table of ranks and cards") {
  const std::vector<RankView> shared(2, sees("node7", {0}));
  REQUIRE_THROWS_WITH(choose_transport("nccl", shared, assign_cards(shared), true),
                      ContainsSubstring("a GPU of its own") &&
                          ContainsSubstring("rank 1  node7  GPU 0  0000:00:00.0  NVIDIA H200  shared with rank 0"));
  const std::vector<RankView> two{sees("a", {0}), sees("b", {0})};
  REQUIRE_THROWS_WITH(choose_transport("ipc", two, assign_cards(two), true), ContainsSubstring("one host"));
  REQUIRE_THROWS_WITH(choose_transport("nccl", shared, assign_cards(shared), false), ContainsSubstring("no NCCL"));
  REQUIRE_THROWS_WITH(choose_transport("mpi", shared, assign_cards(shared), true), ContainsSubstring("auto, ipc or"));
}

TEST_CASE("a view survives its text form") {
  const RankView view = sees("host with spaces", {0, 3});
  const RankView back = qe::parse_rank_view(to_text(view));
  CHECK(back.host == view.host);
  REQUIRE(back.cards.size() == 2);
  CHECK(back.cards[1].uuid == "uuid-3");
  CHECK(back.cards[1].name == "NVIDIA H200");
  CHECK(qe::parse_rank_view(to_text(sees("bare", {}))).cards.empty());
}
