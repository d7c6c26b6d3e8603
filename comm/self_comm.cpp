#include "comm/self_comm.h"

#include <unistd.h>

std::string SelfComm::host() const {
  char name[256] = "localhost";
  gethostname(name, sizeof(name) - 1);
  return name;
}
