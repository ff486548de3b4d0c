// Peers over real gRPC: collectives between servers of one process, and calls that are wrong.
#include "server/peer_service.h"

#include <chrono>
#include <future>
#include <thread>

#include "common/grpc_status.h"
#include "gmock/gmock.h"
#include "grpcpp/generic/generic_stub.h"
#include "proto/protocol.h"
#include "server/grpc_peer_transport.h"
#include "server/peer_collective_testing.h"
#include "server/peer_sum.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;
using testing::kEpoch;
using testing::kRunUid;
using Kind = CollectivePart::Kind;

constexpr int kMaxCalls = 64;

// What asks and answers on one address, with whatever handler it is given.
class PeerServer {
 public:
  PeerServer()
      : transport_(grpc::InsecureChannelCredentials()),
        service_([this](uint64_t run_uid) { return Find(run_uid); }, kMaxCalls) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~PeerServer() { Stop(); }
  void Stop() {
    service_.EndAll(absl::UnavailableError("stopping"));
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }
  void set_handler(std::shared_ptr<PeerHandler> handler) {
    MutexLock lock(&mutex_);
    handler_ = std::move(handler);
  }
  const std::string& address() const { return address_; }
  PeerService& service() { return service_; }
  GrpcPeerTransport& transport() { return transport_; }

 private:
  absl::StatusOr<std::shared_ptr<PeerHandler>> Find(uint64_t run_uid) {
    MutexLock lock(&mutex_);
    if (handler_ == nullptr || run_uid != kRunUid)
      return absl::NotFoundError(absl::StrCat("run ", run_uid, " is not open here"));
    return handler_;
  }

  GrpcPeerTransport transport_;
  PeerService service_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  Mutex mutex_;
  std::shared_ptr<PeerHandler> handler_ ABSL_GUARDED_BY(mutex_);
};

// Keeps what it is asked, unanswered.
class SilentHandler final : public PeerHandler {
 public:
  void OnFetchPart(const v1::FetchPartRequest& request, std::unique_ptr<PeerReply> reply) override {
    MutexLock lock(&mutex_);
    requests_.push_back(request);
    replies_.push_back(std::move(reply));
    changed_.NotifyAll();
  }
  void OnFetchState(const v1::FetchStateRequest&, std::unique_ptr<PeerReply>) override {}
  // The reply of the call that comes next, or came.
  std::unique_ptr<PeerReply> Take() {
    MutexLock lock(&mutex_);
    while (replies_.empty()) changed_.Wait(&mutex_);
    std::unique_ptr<PeerReply> reply = std::move(replies_.front());
    replies_.erase(replies_.begin());
    return reply;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<v1::FetchPartRequest> requests_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<PeerReply>> replies_ ABSL_GUARDED_BY(mutex_);
};

v1::FetchPartRequest Question() {
  v1::FetchPartRequest request;
  request.mutable_sender()->set_run_uid(kRunUid);
  request.set_end(64);
  return request;
}

// A call, and how it ends.
struct Fetched {
  std::string bytes;
  std::promise<absl::Status> ended;
  std::unique_ptr<PeerCall> call;

  absl::Status Await() { return ended.get_future().get(); }
};

void Fetch(PeerServer* from, const std::string& to, const v1::FetchPartRequest& request,
           Fetched* fetched, int64_t timeout_micros = 60000000) {
  fetched->call = from->transport().FetchPart(
      to, request, timeout_micros,
      [fetched](v1::PeerChunk chunk) { fetched->bytes += chunk.payload(); },
      [fetched](const absl::Status& status) { fetched->ended.set_value(status); });
}

// A collective behind a PeerServer.
class Collectives final : public PeerHandler {
 public:
  Collectives(PeerGroup group, PeerTransport* transport, PeerExecutor* executor,
              int64_t timeout_micros)
      : collective(*PeerCollective::Create(std::move(group),
                                           {transport, executor, &RealClock(), timeout_micros})) {}
  void OnFetchPart(const v1::FetchPartRequest& request, std::unique_ptr<PeerReply> reply) override {
    collective->OnFetchPart(request, std::move(reply));
  }
  void OnFetchState(const v1::FetchStateRequest&, std::unique_ptr<PeerReply>) override {}

  const std::unique_ptr<PeerCollective> collective;
};

// Three servers with a collective each, and two shards of one matrix on the second.
struct Cluster {
  explicit Cluster(int64_t timeout_micros) : workers(2), servers(3) {
    PeerGroup group{kRunUid, kEpoch, 0, {}, {{2, 1, 0, 1}}};
    for (const PeerServer& server : servers) group.servers.push_back(server.address());
    for (; group.self < 3; ++group.self) {
      handlers.push_back(std::make_shared<Collectives>(group, &servers[group.self].transport(),
                                                       &workers, timeout_micros));
      servers[group.self].set_handler(handlers.back());
    }
  }
  ~Cluster() {
    for (PeerServer& server : servers) server.Stop();
  }
  std::vector<std::unique_ptr<testing::ShardChain>> Chains(
      const std::vector<testing::PlannedCollective>& planned) {
    const auto cases = testing::MakeCases(planned, 4, 1);
    std::vector<std::unique_ptr<testing::ShardChain>> chains;
    const int owners[] = {2, 1, 0, 1};
    for (size_t shard = 0; shard < 4; ++shard) {
      chains.push_back(std::make_unique<testing::ShardChain>(
          handlers[owners[shard]]->collective.get(), CollectiveKey{1, 0, 0, 0, 0}, shard, cases));
      chains.back()->Next();
    }
    return chains;
  }
  void Await(const std::vector<std::unique_ptr<testing::ShardChain>>& chains) {
    while (!testing::AllEnded(chains)) {
      std::this_thread::yield();
      for (const auto& handler : handlers) handler->collective->Tick();
    }
  }

  PeerWorkers workers;
  std::vector<PeerServer> servers;
  std::vector<std::shared_ptr<Collectives>> handlers;
};

TEST(PeerService, ThreeServersSumMegabytes) {
  Cluster cluster(60000000);
  const auto chains = cluster.Chains({{Kind::kGather, 1 << 20, false},
                                      {Kind::kSumFp32, 2000003, true},
                                      {Kind::kSumFp64, 700001, false},
                                      {Kind::kGather, 3, false}});
  cluster.Await(chains);
  int64_t sums = 0;
  for (const auto& chain : chains) EXPECT_TRUE(chain->status().ok()) << chain->status();
  for (const auto& handler : cluster.handlers) sums += handler->collective->sent().sums;
  // Each adder fetches its segment of the shards that it does not own, and two others fetch it.
  constexpr int kForeign[] = {3, 2, 3};
  int64_t expected = 0;
  for (int32_t j = 0; j < 3; ++j) {
    const auto segment = [j](int64_t n) {
      return SegmentBegin(n, 3, j + 1) - SegmentBegin(n, 3, j);
    };
    expected += (4 * segment(2000003) + 8 * segment(700001)) * (kForeign[j] + 2);
  }
  EXPECT_EQ(sums, expected);
}

TEST(PeerService, AServerThatGoesAwayIsNamed) {
  Cluster cluster(1000000);
  cluster.servers[2].Stop();
  const auto chains = cluster.Chains({{Kind::kSumFp32, 100000, true}});
  cluster.Await(chains);
  const absl::Status status = chains[1]->status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("server 2 (127.0.0.1:"));
}

TEST(PeerService, AnAnswerComesWhole) {
  PeerServer server;
  auto handler = std::make_shared<SilentHandler>();
  server.set_handler(handler);
  Fetched fetched;
  Fetch(&server, server.address(), Question(), &fetched);
  const std::unique_ptr<PeerReply> reply = handler->Take();
  std::string expected;
  for (int i = 0; i < 5; ++i) {
    v1::PeerChunk chunk;
    chunk.set_payload(std::string(700000 * (i % 2) + i, static_cast<char>('a' + i)));
    expected += chunk.payload();
    reply->Write(std::move(chunk));
  }
  reply->Finish(absl::NotFoundError("the end"));
  EXPECT_EQ(fetched.Await(), absl::NotFoundError("the end"));
  EXPECT_EQ(fetched.bytes, expected);
}

TEST(PeerService, ARunThatIsNotOpenIsNotFound) {
  PeerServer server;
  Fetched fetched;
  Fetch(&server, server.address(), Question(), &fetched);
  EXPECT_EQ(fetched.Await().code(), absl::StatusCode::kNotFound);
}

TEST(PeerService, AnUnreachablePeerIsUnavailableAtOnce) {
  PeerServer server;
  std::string gone;
  {
    PeerServer other;
    gone = other.address();
  }
  Fetched fetched;
  Fetch(&server, gone, Question(), &fetched);
  EXPECT_EQ(fetched.Await().code(), absl::StatusCode::kUnavailable);
}

// Bytes that no stub of ours sends.
absl::Status SendRaw(const std::string& address, const std::string& bytes) {
  grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  std::promise<grpc::Status> ended;
  stub.UnaryCall(&context, "/stiefel.v1.Peer/FetchPart", grpc::StubOptions(), &request, &response,
                 [&](grpc::Status status) { ended.set_value(status); });
  return FromGrpcStatus(ended.get_future().get());
}

TEST(PeerService, BrokenAndUnknownBytesAreRefused) {
  PeerServer server;
  server.set_handler(std::make_shared<SilentHandler>());
  EXPECT_EQ(SendRaw(server.address(), "\xff\xff\xff").code(), absl::StatusCode::kInvalidArgument);
  v1::FetchPartRequest request = Question();
  request.mutable_sender()
      ->GetReflection()
      ->MutableUnknownFields(request.mutable_sender())
      ->AddVarint(37, 1);
  const absl::Status unknown = SendRaw(server.address(), request.SerializeAsString());
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("field 37 of PeerSender"));
}

TEST(PeerService, TheHandlerSeesThatTheCallerWentAway) {
  PeerServer server;
  auto handler = std::make_shared<SilentHandler>();
  server.set_handler(handler);
  Fetched fetched;
  Fetch(&server, server.address(), Question(), &fetched);
  const std::unique_ptr<PeerReply> reply = handler->Take();
  EXPECT_FALSE(reply->caller_gone());
  fetched.call.reset();
  while (!reply->caller_gone()) std::this_thread::yield();
  reply->Write({});
  reply->Finish(absl::OkStatus());
}

TEST(PeerService, AnAnswerThatIsDroppedSaysAskAgain) {
  PeerServer server;
  auto handler = std::make_shared<SilentHandler>();
  server.set_handler(handler);
  Fetched fetched;
  Fetch(&server, server.address(), Question(), &fetched);
  handler->Take().reset();
  EXPECT_EQ(fetched.Await().code(), absl::StatusCode::kUnavailable);
}

TEST(PeerService, CallsBeyondTheBoundAreRefusedAndShutdownEndsThemAll) {
  PeerServer server;
  auto handler = std::make_shared<SilentHandler>();
  server.set_handler(handler);
  std::vector<Fetched> fetched(kMaxCalls);
  std::vector<std::unique_ptr<PeerReply>> replies;
  for (Fetched& one : fetched) {
    Fetch(&server, server.address(), Question(), &one);
    replies.push_back(handler->Take());
  }
  Fetched further;
  Fetch(&server, server.address(), Question(), &further);
  EXPECT_EQ(further.Await().code(), absl::StatusCode::kResourceExhausted);
  server.service().EndAll(absl::UnavailableError("the server is shutting down"));
  for (Fetched& one : fetched) EXPECT_EQ(one.Await().code(), absl::StatusCode::kUnavailable);
}

TEST(PeerService, ACallEndsWhenItsTimeIsOver) {
  PeerServer server;
  auto handler = std::make_shared<SilentHandler>();
  server.set_handler(handler);
  Fetched fetched;
  Fetch(&server, server.address(), Question(), &fetched, 50000);
  EXPECT_EQ(fetched.Await().code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace stiefel
