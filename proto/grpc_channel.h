// How every caller of a server connects: trainers, and other servers.
#ifndef STIEFEL_PROTO_GRPC_CHANNEL_H_
#define STIEFEL_PROTO_GRPC_CHANNEL_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace stiefel {

// A connection of its own to HOST:PORT, made when first used and again when it broke (after 50 ms
// to 2 s). gRPC makes no call twice; pings every 10 s tell a dead peer.
std::shared_ptr<grpc::Channel> MakeGrpcChannel(
    const std::string& address, const std::shared_ptr<grpc::ChannelCredentials>& credentials);

}  // namespace stiefel

#endif  // STIEFEL_PROTO_GRPC_CHANNEL_H_
