#include "server/unknown_fields.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "proto/protocol.h"

namespace stiefel {

absl::Status RefuseUnknownFields(const google::protobuf::Message& message) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  const auto& unknown = reflection.GetUnknownFields(message);
  if (unknown.field_count() > 0) {
    return absl::InvalidArgumentError(absl::StrCat("field ", unknown.field(0).number(), " of ",
                                                   message.GetDescriptor()->name(),
                                                   " is not known to server ", kSoftwareVersion));
  }
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const google::protobuf::FieldDescriptor* field : fields) {
    if (field->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      STIEFEL_RETURN_IF_ERROR(RefuseUnknownFields(reflection.GetMessage(message, field)));
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
      STIEFEL_RETURN_IF_ERROR(
          RefuseUnknownFields(reflection.GetRepeatedMessage(message, field, i)));
    }
  }
  return absl::OkStatus();
}

}  // namespace stiefel
