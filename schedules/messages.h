// Which messages a schedule has: who talks to whom, and which RECV answers which SEND.
// Owns the neighbour rules only; where a message stands in a list is decided by lower().
#pragma once

#include "core/schedule.h"

namespace qe {

// The stage whose F (for a SEND_F or RECV_F) or I (for the B pair) is at the other end. May lie outside 0 .. S-1.
StageIndex peer_stage(const Action& message);

// Does this F's output, or this I's or B's input gradient, leave the rank? Same question for a SEND or RECV itself:
// does the message exist? False at the ends of the pipeline and between neighbours that share a rank.
bool crosses_ranks(const Schedule&, const Action&);

// The message that carries the result of an F, I or B.
Action send_of(const Action& compute);
// The same message at its receiver.
Action recv_of(const Action& send);

}  // namespace qe
