// The server on real gRPC, spoken to with the raw stubs that any language generates.
#include "server/service.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <random>

#include "common/checksum.h"
#include "common/grpc_status.h"
#include "gmock/gmock.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/health_check_service_interface.h"
#include "gtest/gtest.h"
#include "kernels/reference/reference_rule.h"
#include "proto/chunk_codec.h"
#include "proto/protocol.h"
#include "server/testing/test_server.h"
#include "stiefel/v1/status.grpc.pb.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 64, kCols = 10000;  // 2.5 MB: two pieces each way

std::unique_ptr<grpc::ClientContext> Context(double seconds = 60) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() +
                        std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
  return context;
}

v1::OpenRunRequest Opened(int64_t rows = kRows, int64_t cols = kCols, int world_size = 1) {
  v1::OpenRunRequest request;
  request.set_name("test");
  request.set_run_uid(7);
  *request.mutable_leader() = Incarnation(1, 100).ToProto();
  request.set_world_size(world_size);
  request.set_start_step(1);
  request.set_update_mode(v1::DELTA);
  v1::Parameter* parameter = request.add_parameters();
  parameter->set_name("w");
  parameter->add_shape(rows);
  parameter->add_shape(cols);
  parameter->mutable_rule()->set_preset("muon");
  request.add_phases(0);
  request.add_owners(0);
  request.add_servers("here:1");
  request.set_placement_epoch(1);
  request.set_protocol_version(kProtocolVersion);
  return request;
}

v1::JoinRunRequest Join(int rank = 0, int world_size = 1) {
  v1::JoinRunRequest join;
  join.set_name("test");
  join.set_rank(rank);
  join.set_world_size(world_size);
  *join.mutable_incarnation() = Incarnation(1, 100).ToProto();
  join.set_applied_step(0);
  join.set_protocol_version(kProtocolVersion);
  join.set_wait_seconds(60);
  v1::PushBlock* push = join.add_push();
  push->set_parameter("w");
  push->mutable_rect()->set_row_end(kRows);
  push->mutable_rect()->set_col_end(kCols);
  v1::PullBlock* pull = join.add_pull();
  pull->set_parameter("w");
  *pull->mutable_rect() = push->rect();
  return join;
}

v1::Sender SenderOf(int rank = 0) {
  v1::Sender sender;
  sender.set_run_uid(7);
  sender.set_placement_epoch(1);
  sender.set_rank(rank);
  *sender.mutable_incarnation() = Incarnation(1, 100).ToProto();
  return sender;
}

using ControlClient = grpc::ClientReaderWriter<v1::TrainerMessage, v1::ServerMessage>;
using DataClient = grpc::ClientReaderWriter<v1::Chunk, v1::Chunk>;

class ServiceTest : public ::testing::Test {
 protected:
  ServiceTest()
      : stub_(v1::Optimizer::NewStub(server_.NewChannel())),
        status_(v1::Status::NewStub(server_.NewChannel())) {}

  grpc::Status Open(const v1::OpenRunRequest& request = Opened()) {
    v1::OpenRunResponse response;
    return stub_->OpenRun(Context().get(), request, &response);
  }
  grpc::Status JoinAs(const v1::JoinRunRequest& request) {
    v1::JoinRunResponse response;
    return stub_->JoinRun(Context().get(), request, &response);
  }
  std::unique_ptr<ControlClient> ConnectControl(grpc::ClientContext* context, int rank = 0) {
    auto stream = stub_->Control(context);
    v1::TrainerMessage hello;
    *hello.mutable_sender() = SenderOf(rank);
    hello.mutable_hello();
    EXPECT_TRUE(stream->Write(hello));
    return stream;
  }
  std::unique_ptr<DataClient> ConnectData(grpc::ClientContext* context, int rank = 0) {
    auto stream = stub_->Data(context);
    v1::Chunk hello;
    hello.mutable_header()->set_type(v1::ChunkHeader::HELLO);
    *hello.mutable_header()->mutable_sender() = SenderOf(rank);
    EXPECT_TRUE(stream->Write(hello));
    return stream;
  }
  // The server answers as before whatever was done to it.
  void ExpectAlive() {
    v1::ServerInfo info;
    const auto fresh = v1::Optimizer::NewStub(server_.NewChannel());
    const grpc::Status status = fresh->GetServerInfo(Context(10).get(), {}, &info);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(info.protocol_version(), kProtocolVersion);
  }

  TestServer server_;
  std::unique_ptr<v1::Optimizer::Stub> stub_;
  std::unique_ptr<v1::Status::Stub> status_;
};

v1::TrainerMessage Message() {
  v1::TrainerMessage message;
  *message.mutable_sender() = SenderOf();
  return message;
}

v1::ServerMessage Next(ControlClient* control, v1::ServerMessage::KindCase kind) {
  v1::ServerMessage message;
  while (control->Read(&message)) {
    if (message.kind_case() == kind) return message;
  }
  ADD_FAILURE() << "the control stream ended: " << control->Finish().error_message();
  return {};
}

TEST_F(ServiceTest, AWholeStepThroughGeneratedStubs) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(JoinAs(Join()).ok());
  auto control_context = Context(), data_context = Context();
  auto control = ConnectControl(control_context.get());
  auto data = ConnectData(data_context.get());

  v1::TrainerMessage begin = Message();
  begin.mutable_begin_step()->set_step(1);
  ASSERT_TRUE(control->Write(begin));
  Next(control.get(), v1::ServerMessage::kCredit);

  const Dense gradient = RandomNormal(kRows, kCols, 1);
  const std::vector<float> values(gradient.values.begin(), gradient.values.end());
  const int64_t half = 30 * kCols;
  for (const int64_t offset : {half, int64_t{0}}) {  // the order does not matter
    const int64_t count = offset == 0 ? half : kRows * kCols - half;
    v1::Chunk chunk;
    chunk.mutable_header()->set_type(v1::ChunkHeader::GRADIENT);
    *chunk.mutable_header()->mutable_sender() = SenderOf();
    chunk.mutable_header()->set_step(1);
    v1::Piece* piece = chunk.mutable_header()->add_pieces();
    piece->set_offset(offset);
    piece->set_count(count);
    piece->set_crc32c(Crc32c(values.data() + offset, count * 4));
    chunk.set_payload(values.data() + offset, count * 4);
    ASSERT_TRUE(data->Write(chunk));
  }
  v1::TrainerMessage end = Message();
  end.mutable_end_push()->set_step(1);
  ASSERT_TRUE(control->Write(end));
  const v1::Vote vote = Next(control.get(), v1::ServerMessage::kVote).vote();
  EXPECT_NEAR(vote.matrices(0).sum_squares() / std::pow(FrobeniusNorm(gradient), 2), 1, 1e-6);

  std::vector<float> delta(kRows * kCols);
  int64_t received = 0;
  while (received < kRows * kCols) {
    v1::Chunk chunk;
    ASSERT_TRUE(data->Read(&chunk));
    EXPECT_LE(static_cast<int64_t>(chunk.ByteSizeLong()), kMaxMessageBytes);
    const char* payload = chunk.payload().data();
    for (const v1::Piece& piece : chunk.header().pieces()) {
      EXPECT_EQ(Crc32c(payload, piece.count() * 4), piece.crc32c());
      std::memcpy(delta.data() + piece.offset(), payload, piece.count() * 4);
      payload += piece.count() * 4;
      received += piece.count();
    }
  }
  v1::TrainerMessage decide = Message();
  decide.mutable_decide()->set_step(1);
  decide.mutable_decide()->set_outcome(v1::COMMIT);
  decide.mutable_decide()->set_grad_norm(3);
  ASSERT_TRUE(control->Write(decide));
  EXPECT_EQ(Next(control.get(), v1::ServerMessage::kDecided).decided().outcome(), v1::COMMIT);

  const Rule rule = *PresetRule("muon");
  StepArgs args;
  args.lr = rule.lr;
  const ReferenceStep expected = ReferenceRule(rule, kRows, kCols).Step(gradient, args);
  double worst = 0;
  for (size_t i = 0; i < delta.size(); ++i)
    worst = std::max(worst, std::abs(delta[i] - expected.delta.values[i]));
  // bf16 products where the machine has them: a few units of 2^-8.
  EXPECT_LT(worst / MaxAbs(expected.delta), 0.05);

  v1::GetStatusRequest request;
  request.set_state_hash(true);
  v1::ServerStatus status;
  ASSERT_TRUE(status_->GetStatus(Context().get(), request, &status).ok());
  EXPECT_EQ(status.runs(0).consumed_step(), 1);
  EXPECT_EQ(status.runs(0).last_grad_norm(), 3);
  EXPECT_TRUE(status.runs(0).has_state_hash());
  EXPECT_EQ(status.runs(0).matrices(0).refreshes(), 1);
  EXPECT_EQ(status.runs(0).matrices(0).rule(), "muon");  // CASES B13
  EXPECT_GT(status.resident_bytes(), 0);
  EXPECT_EQ(status.address(), server_.address());
  v1::CloseRunRequest close;
  *close.mutable_sender() = SenderOf();
  v1::CloseRunResponse closed;
  ASSERT_TRUE(stub_->CloseRun(Context().get(), close, &closed).ok());
  EXPECT_TRUE(closed.run_ended());
}

TEST_F(ServiceTest, UnknownFieldsAreRefusedWithTheirNumber) {
  // CASES E18.
  v1::OpenRunRequest open = Opened();
  open.mutable_parameters(0)
      ->mutable_rule()
      ->GetReflection()
      ->MutableUnknownFields(open.mutable_parameters(0)->mutable_rule())
      ->AddVarint(1037, 1);
  const grpc::Status refused = Open(open);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("field 1037 of Rule is not known to server"));
  ASSERT_TRUE(Open().ok());
  v1::JoinRunRequest join = Join();
  join.GetReflection()->MutableUnknownFields(&join)->AddVarint(99, 1);
  EXPECT_EQ(JoinAs(join).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  ASSERT_TRUE(JoinAs(Join()).ok());
  auto context = Context();
  auto control = ConnectControl(context.get());
  v1::TrainerMessage message = Message();
  message.mutable_begin_step()->set_step(1);
  message.mutable_begin_step()
      ->GetReflection()
      ->MutableUnknownFields(message.mutable_begin_step())
      ->AddVarint(50, 1);
  ASSERT_TRUE(control->Write(message));
  v1::ServerMessage answer;
  while (control->Read(&answer)) {
  }
  EXPECT_THAT(control->Finish().error_message(), HasSubstr("field 50 of BeginStep"));
}

TEST_F(ServiceTest, JoinWaitsForAllAndItsCallerMayLeave) {
  ASSERT_TRUE(Open(Opened(kRows, kCols, 2)).ok());
  v1::JoinRunResponse response;
  EXPECT_EQ(stub_->JoinRun(Context(0.2).get(), Join(0, 2), &response).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);  // E12: near the caller's deadline
  grpc::Status first;
  std::thread waiting([&] { first = JoinAs(Join(0, 2)); });
  EXPECT_TRUE(JoinAs(Join(1, 2)).ok());
  waiting.join();
  EXPECT_TRUE(first.ok()) << first.error_message();
  v1::JoinRunRequest unknown = Join();
  unknown.set_name("other");
  EXPECT_EQ(JoinAs(unknown).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServiceTest, StreamsMustSayWhoseTheyAre) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(JoinAs(Join()).ok());
  auto context = Context();
  auto control = stub_->Control(context.get());
  v1::TrainerMessage heartbeat = Message();
  heartbeat.mutable_heartbeat();
  ASSERT_TRUE(control->Write(heartbeat));
  v1::ServerMessage answer;
  EXPECT_FALSE(control->Read(&answer));
  EXPECT_EQ(control->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  auto other = Context();
  auto data = stub_->Data(other.get());
  v1::Chunk chunk;
  chunk.mutable_header()->set_type(v1::ChunkHeader::HELLO);
  *chunk.mutable_header()->mutable_sender() = SenderOf();
  chunk.mutable_header()->mutable_sender()->mutable_incarnation()->set_id(99);
  ASSERT_TRUE(data->Write(chunk));
  EXPECT_FALSE(data->Read(&chunk));
  EXPECT_EQ(data->Finish().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(ServiceTest, HugeDeclarationsAreRefused) {
  // CASES D16.
  EXPECT_EQ(Open(Opened(1 << 20, 2621440)).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Open(Opened(int64_t{1} << 40, int64_t{1} << 40)).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  ExpectAlive();
}

// Writes raw bytes to the port and reads until the server closes or a second has passed.
void Talk(int port, const std::string& bytes) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const timeval second{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof(second));
  send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  shutdown(fd, SHUT_WR);
  char buffer[4096];
  while (recv(fd, buffer, sizeof(buffer), 0) > 0) {
  }
  close(fd);
}

TEST_F(ServiceTest, HostileBytesDoNotHurt) {
  // CASES D7.
  const int port = server_.server().port();
  Talk(port, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  Talk(port, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + std::string("\x00\x40\x00\x09", 4));
  std::mt19937 random(1);
  for (int i = 0; i < 5; ++i) {
    std::string bytes(1000 * (i + 1), '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    Talk(port, bytes);
  }
  // Well-framed garbage on every method that takes byte buffers or messages.
  grpc::GenericStub generic(server_.NewChannel());
  for (const char* method : {"OpenRun", "JoinRun", "TakeOver", "CloseRun", "Control", "Data",
                             "InitWeights", "NoSuchMethod"}) {
    std::string bytes(100, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer message(&slice, 1);
    auto context = Context(10);
    grpc::CompletionQueue queue;
    auto call =
        generic.PrepareCall(context.get(), std::string("/stiefel.v1.Optimizer/") + method, &queue);
    void* tag;
    bool ok;
    call->StartCall(nullptr);
    queue.Next(&tag, &ok);
    call->WriteLast(message, {}, nullptr);
    queue.Next(&tag, &ok);
    grpc::Status status;
    call->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
    EXPECT_FALSE(status.ok()) << method;
    EXPECT_NE(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << method;
  }
  // A message above the limit (CASES E1).
  v1::OpenRunRequest large = Opened();
  large.set_name(std::string(5 << 20, 'x'));
  EXPECT_EQ(Open(large).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  ExpectAlive();
}

TEST_F(ServiceTest, PortInUseAndForeignAddressesAreSaidPlainly) {
  ServerOptions options = TestServerOptions();
  options.listen = server_.address();
  const absl::Status used = GrpcServer::Start(options).status();
  EXPECT_EQ(used.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(used.message()), HasSubstr("in use"));
  options.listen = "0.0.0.0:0";
  const absl::Status open = GrpcServer::Start(options).status();
  EXPECT_EQ(open.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(open.message()), HasSubstr("--insecure"));
  options.insecure = true;
  EXPECT_TRUE(GrpcServer::Start(options).ok());
  for (const char* bad : {"127.0.0.1", ":0", "127.0.0.1:70000", "::1:0", "no such host:1"}) {
    options.listen = bad;
    EXPECT_FALSE(GrpcServer::Start(options).ok()) << bad;
  }
}

TEST_F(ServiceTest, HealthAndReflectionAnswer) {
  // grpc.health.v1.HealthCheckResponse{status: SERVING} is field 1 = 1.
  grpc::GenericStub generic(server_.NewChannel());
  const auto call = [&](const std::string& method, const std::string& bytes) {
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    auto context = Context(10);
    grpc::CompletionQueue queue;
    auto rpc = generic.PrepareUnaryCall(context.get(), method, request, &queue);
    rpc->StartCall();
    grpc::ByteBuffer response;
    grpc::Status status;
    rpc->Finish(&response, &status, nullptr);
    void* tag;
    bool ok;
    queue.Next(&tag, &ok);
    EXPECT_TRUE(status.ok()) << status.error_message();
    std::vector<grpc::Slice> slices;
    EXPECT_TRUE(response.Dump(&slices).ok());
    std::string answer;
    for (const grpc::Slice& s : slices)
      answer.append(reinterpret_cast<const char*>(s.begin()), s.size());
    return answer;
  };
  EXPECT_EQ(call("/grpc.health.v1.Health/Check", ""), std::string("\x08\x01"));
  // ServerReflectionRequest{list_services: ""}: field 7, empty.
  EXPECT_THAT(call("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                   std::string("\x3a\x00", 2)),
              HasSubstr("stiefel.v1.Optimizer"));
}

TEST_F(ServiceTest, WatchSendsASnapshotAndThenChanges) {
  v1::WatchStatusRequest request;
  request.set_min_interval_seconds(0);
  auto context = Context();
  auto watch = status_->WatchStatus(context.get(), request);
  v1::ServerStatus status;
  ASSERT_TRUE(watch->Read(&status));
  EXPECT_EQ(status.runs_size(), 0);
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(watch->Read(&status));
  EXPECT_EQ(status.runs(0).phase(), "joining");
  ASSERT_TRUE(JoinAs(Join()).ok());
  ASSERT_TRUE(watch->Read(&status));
  EXPECT_EQ(status.runs(0).phase(), "idle");
  context->TryCancel();
  while (watch->Read(&status)) {
  }
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(ServiceTest, ShutdownEndsOpenStreamsWithinTheGrace) {
  // CASES E10: 16 open streams, none of which the clients end, and a join that waits.
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(JoinAs(Join()).ok());
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<DataClient>> streams;
  for (int i = 0; i < 16; ++i) {
    contexts.push_back(Context());
    streams.push_back(ConnectData(contexts.back().get()));
  }
  while (server_.core().FindRun("test").value()->open_streams() < 16) std::this_thread::yield();
  const int64_t begin = RealClock().NowMicros();
  server_.server().Shutdown();
  EXPECT_LT(RealClock().NowMicros() - begin, 5 * 1000000);
  for (auto& stream : streams) {
    v1::Chunk chunk;
    EXPECT_FALSE(stream->Read(&chunk));
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  }
}

TEST_F(ServiceTest, StreamsAreLimited) {
  ServerOptions options = TestServerOptions();
  options.max_streams_per_rank = 2;
  TestServer small(options);
  const auto stub = v1::Optimizer::NewStub(small.NewChannel());
  v1::OpenRunResponse opened;
  ASSERT_TRUE(stub->OpenRun(Context().get(), Opened(), &opened).ok());
  v1::JoinRunResponse joined;
  ASSERT_TRUE(stub->JoinRun(Context().get(), Join(), &joined).ok());
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<DataClient>> streams;
  for (int i = 0; i < 3; ++i) {
    contexts.push_back(Context());
    streams.push_back(stub->Data(contexts.back().get()));
    v1::Chunk hello;
    hello.mutable_header()->set_type(v1::ChunkHeader::HELLO);
    *hello.mutable_header()->mutable_sender() = SenderOf();
    ASSERT_TRUE(streams.back()->Write(hello));
    while (i < 2 && small.core().FindRun("test").value()->open_streams() <= i)
      std::this_thread::yield();
  }
  v1::Chunk chunk;
  EXPECT_FALSE(streams[2]->Read(&chunk));
  EXPECT_EQ(streams[2]->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  for (auto& context : contexts) context->TryCancel();
}

}  // namespace
}  // namespace stiefel
