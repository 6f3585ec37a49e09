#include "kernels/wire/solo_transport.h"

#include "core/error.h"

namespace qe {

void SoloTransport::send(Stream&, const void*, std::size_t, int, const Action&) {
  QE_EXPECTS(false, "one rank has no other to send to");
}
void SoloTransport::recv(Stream&, void*, std::size_t, int, const Action&) {
  QE_EXPECTS(false, "one rank has no other to receive from");
}

}  // namespace qe
