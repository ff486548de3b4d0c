#ifndef STIEFEL_CLIENT_GRPC_TRANSPORT_H_
#define STIEFEL_CLIENT_GRPC_TRANSPORT_H_

#include "client/transport.h"

namespace stiefel {

// Servers over gRPC, callback API. Chunks go as raw byte buffers: a small header, and slices that
// point at the gradient itself. One channel for calls and control, and one for each data stream,
// which shares no connection with any other. Retries are off: the session resends by meaning. A
// dead peer ends its streams after keepalive (10 s + 10 s, which is TCP_USER_TIMEOUT too). Lives
// for ever.
Transport* GrpcTransport();

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_GRPC_TRANSPORT_H_
