// A computenetwork.dll with the entry points that hnslib calls. Each call goes to a fake HNS, package fakehns, at the TCP
// address in the environment variable FAKE_HNS. Windows has RPC there. All numbers are little-endian:
//
//   request:  length of what follows (4), handle (8), GUID (16), length of the name (1), name, JSON in UTF-8
//   response: length of what follows (4), HRESULT (4), handle (8), length of the text (4), text, error
//
// vmcompute.dll forwards HNSCall to this one.
#include <windows.h>
#include <objbase.h>
#include <stdio.h>
#include <stdlib.h>

#define NOT_RUNNING ((HRESULT)0x800706b5) // RPC_S_UNKNOWN_IF: what a caller gets while HNS restarts

static SRWLOCK lock = SRWLOCK_INIT;
static long long service = -1; // a socket
static char *buffer; // the last answer
static UINT32 received, capacity;

// linux makes a system call, which costs a tenth of what Wine's sockets cost. Wine interrupts some by signals.
static long long linux_call(long long number, long long a, long long b, long long c, long long d, long long e) {
  long long result;
  do {
    register long long r10 __asm__("r10") = d;
    register long long r8 __asm__("r8") = e;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
  } while (result == -4); // EINTR
  return result;
}
enum { linux_close = 3, linux_socket = 41, linux_connect, linux_sendto = 44, linux_recvfrom, linux_setsockopt = 54 };

// disconnect is what a failed call does: the next one connects again.
static HRESULT disconnect(void) {
  if (service >= 0) linux_call(linux_close, service, 0, 0, 0, 0);
  service = -1;
  return NOT_RUNNING;
}

static BOOL connected(void) {
  static char last[64];
  char address[64];
  int one = 1, a, b, c, d, port;
  DWORD n = GetEnvironmentVariableA("FAKE_HNS", address, sizeof address);

  if (service >= 0 && n != 0 && !strcmp(address, last)) return TRUE;
  disconnect();
  if (n == 0 || n >= sizeof address || sscanf(address, "%d.%d.%d.%d:%d", &a, &b, &c, &d, &port) != 5) return FALSE;
  strcpy(last, address);
  UINT8 to[16] = {2, 0, port >> 8, port, a, b, c, d}; // a struct sockaddr_in
  service = linux_call(linux_socket, 2, 1 | 02000000, 0, 0, 0); // AF_INET, SOCK_STREAM, SOCK_CLOEXEC
  if (service < 0) return FALSE;
  linux_call(linux_setsockopt, service, 6, 1, (long long)&one, sizeof one); // TCP_NODELAY
  return linux_call(linux_connect, service, (long long)to, sizeof to, 0, 0) == 0;
}

static BOOL send_all(const char *p, UINT32 n) {
  for (long long sent; n > 0; p += sent, n -= sent)
    if ((sent = linux_call(linux_sendto, service, (long long)p, n, 0x4000, 0)) <= 0) return FALSE; // MSG_NOSIGNAL
  return TRUE;
}

// receive reads until it has n bytes of an answer, and more if they have come.
static BOOL receive(UINT32 n) {
  while (received < n) {
    if (n > capacity) buffer = realloc(buffer, capacity = n > 65536 ? n : 65536);
    long long got = linux_call(linux_recvfrom, service, (long long)(buffer + received), capacity - received, 0, 0);
    if (got <= 0) return FALSE;
    received += (UINT32)got;
  }
  return TRUE;
}

// text gives the caller a string, which CoTaskMemFree frees: none instead of an empty one.
static void text(WCHAR **to, const char *from, int n) {
  if (!to) return;
  *to = 0;
  if (n == 0) return;
  int wide = MultiByteToWideChar(CP_UTF8, 0, from, n, 0, 0);
  *to = CoTaskMemAlloc((wide + 1) * sizeof(WCHAR));
  MultiByteToWideChar(CP_UTF8, 0, from, n, *to, wide);
  (*to)[wide] = 0;
}

static char *request(const char *name, const GUID *id, UINT64 handle, const WCHAR *json, UINT32 *length) {
  size_t named = strlen(name);
  int bytes = json ? WideCharToMultiByte(CP_UTF8, 0, json, -1, 0, 0, 0, 0) : 0; // with a zero at the end
  UINT32 n = 25 + named + (bytes ? bytes - 1 : 0);
  char *b = calloc(1, 4 + n + 1);
  memcpy(b, &n, 4);
  memcpy(b + 4, &handle, 8);
  if (id) memcpy(b + 12, id, 16);
  b[28] = (char)named;
  memcpy(b + 29, name, named);
  if (bytes) WideCharToMultiByte(CP_UTF8, 0, json, -1, b + 29 + named, bytes, 0, 0);
  *length = 4 + n;
  return b;
}

// exchange is called with the lock: one call at a time, on one connection. The answer is in the buffer.
static BOOL exchange(const char *sent, UINT32 length) {
  received = 0;
  return connected() && send_all(sent, length) && receive(4) && receive(4 + *(UINT32 *)buffer);
}

static HRESULT call(const char *name, const GUID *id, UINT64 handle, const WCHAR *json,
                    UINT64 *new_handle, WCHAR **answer, WCHAR **error) {
  UINT32 length, n;
  char *sent = request(name, id, handle, json, &length);
  HRESULT result;

  AcquireSRWLockExclusive(&lock);
  if (exchange(sent, length)) {
    memcpy(&result, buffer + 4, 4);
    if (new_handle) memcpy(new_handle, buffer + 8, 8);
    memcpy(&n, buffer + 16, 4);
    text(answer, buffer + 20, n);
    text(error, buffer + 20 + n, received - 20 - n);
  } else {
    result = disconnect();
  }
  ReleaseSRWLockExclusive(&lock);
  free(sent);
  return result;
}

#define X __declspec(dllexport) HRESULT WINAPI
#define KIND(N) \
  X HcnEnumerate##N##s(PCWSTR q, PWSTR *a, PWSTR *e) { return call("Enumerate" #N, 0, 0, q, 0, a, e); } \
  X HcnOpen##N(GUID *id, UINT64 *h, PWSTR *e) { return call("Open" #N, id, 0, 0, h, 0, e); } \
  X HcnModify##N(UINT64 h, PCWSTR s, PWSTR *e) { return call("Modify" #N, 0, h, s, 0, 0, e); } \
  X HcnQuery##N##Properties(UINT64 h, PCWSTR q, PWSTR *a, PWSTR *e) { return call("Query" #N, 0, h, q, 0, a, e); } \
  X HcnDelete##N(GUID *id, PWSTR *e) { return call("Delete" #N, id, 0, 0, 0, 0, e); } \
  X HcnClose##N(UINT64 h) { return call("Close" #N, 0, h, 0, 0, 0, 0); }
#define CREATE(N) \
  X HcnCreate##N(GUID *id, PCWSTR s, UINT64 *h, PWSTR *e) { return call("Create" #N, id, 0, s, h, 0, e); }

KIND(Network) CREATE(Network)
KIND(LoadBalancer) CREATE(LoadBalancer)
KIND(Endpoint)
X HcnCreateEndpoint(UINT64 network, GUID *id, PCWSTR s, UINT64 *h, PWSTR *e) {
  return call("CreateEndpoint", id, network, s, h, 0, e);
}

// HNSCall is the older interface: only its GET is used, of a path such as /globals/version.
X HNSCall(PCWSTR method, PCWSTR path, PCWSTR object, PWSTR *answer) {
  (void)method; (void)object;
  return call("HNSCall", 0, 0, path, 0, answer, 0);
}

BOOL WINAPI DllMain(HINSTANCE h, DWORD reason, LPVOID reserved) {
  (void)h; (void)reason; (void)reserved;
  return TRUE;
}
