#include "server/listen_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace stiefel {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

absl::StatusOr<Addresses> Lookup(const std::string& host, int port) {
  addrinfo hints;
  std::memset(&hints, 0, sizeof(hints));
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0)
    return absl::NotFoundError(
        absl::StrCat("host \"", host, "\" does not resolve: ", gai_strerror(error)));
  return Addresses(list);
}

bool IsLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
  }
  if (address->sa_family != AF_INET6) return false;
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
  return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

std::string Numeric(const addrinfo& entry) {
  char text[NI_MAXHOST] = "";
  getnameinfo(entry.ai_addr, entry.ai_addrlen, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return entry.ai_family == AF_INET6 ? absl::StrCat("[", text, "]") : std::string(text);
}

}  // namespace

absl::StatusOr<ListenAddress> ResolveListenAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  ListenAddress address;
  if (colon == std::string::npos || !absl::SimpleAtoi(text.substr(colon + 1), &address.port) ||
      address.port < 0 || address.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("listen address \"", text, "\" is not HOST:PORT with a port up to 65535"));
  }
  address.host = text.substr(0, colon);
  if (address.host.size() >= 2 && address.host.front() == '[' && address.host.back() == ']') {
    address.host = address.host.substr(1, address.host.size() - 2);
  } else if (address.host.empty() || address.host.find(':') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(
        "listen address \"", text, "\" is not HOST:PORT; an IPv6 address stands in brackets"));
  }
  STIEFEL_ASSIGN_OR_RETURN(const Addresses list, Lookup(address.host, address.port));
  address.numeric = Numeric(*list);
  address.loopback = true;
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next)
    address.loopback = address.loopback && IsLoopback(entry->ai_addr);
  return address;
}

absl::Status ProbeListen(const ListenAddress& address) {
  STIEFEL_ASSIGN_OR_RETURN(const Addresses list, Lookup(address.host, address.port));
  const int fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::UnavailableError(absl::StrCat("no socket: ", std::strerror(errno)));
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const bool bound = bind(fd, list->ai_addr, list->ai_addrlen) == 0 && listen(fd, 1) == 0;
  const int error = errno;
  close(fd);
  if (bound) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address.numeric, ":",
                                             address.port, ": ", std::strerror(error)));
}

}  // namespace stiefel
