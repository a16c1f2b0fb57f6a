// A pretended NVIDIA GPU: libcuda, the CUDA runtime, cuBLAS(Lt) and a little of NVML, as far as PyTorch calls them.
//
// Device memory is the host's (mapped, zeroed, resident only where it is touched). Copies and fills are made; kernels
// are counted and do nothing. So all host code of CUDA PyTorch runs as on a GPU: its checks of types, shapes, strides
// and compute capability, its caching allocator, streams, events, pinned memory, autograd's threads. What kernels would
// have computed is there only where something else computes it (device_values.py).
//
//   PRETENDED_GPU          T4 | A100 | L4 | RTX4090 | H100 | B200     (default H100)
//   PRETENDED_GPU_GIB      memory of the device                        (default the card's own)
//   PRETENDED_GPU_LATE=1   what is queued on a side stream is done as late as events allow (order.py switches it as well)
//   PRETENDED_GPU_TOUCH    bytes above which copies and fills are left out, so that large models take no memory
//   PRETENDED_GPU_NAMES=1  counts launches by the kernel's name, for pretended_write_launches
//   PRETENDED_GPU_LOG      a file that every call with an effect is written to
//
// One device; one thread at a time, under one lock. Written for the CUDA 13 builds of PyTorch.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <driver_types.h>

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

// cuda.h renames these to their newer versions; the functions below have the names that libraries look up.
#undef cuCtxCreate
#undef cuCtxDestroy
#undef cuCtxPopCurrent
#undef cuCtxPushCurrent
#undef cuDevicePrimaryCtxRelease
#undef cuDeviceTotalMem
#undef cuEventDestroy
#undef cuEventElapsedTime
#undef cuGetProcAddress
#undef cuMemAlloc
#undef cuMemFree
#undef cuMemGetAddressRange
#undef cuMemcpyDtoH
#undef cuMemcpyHtoD
#undef cuStreamDestroy
#define API extern "C" __attribute__((visibility("default")))

namespace {

struct Card {
  const char *key, *name;
  int major, minor, sms;
  double gib;
  int smem_optin, smem_sm, threads_sm, blocks_sm;
};
const Card kCards[] = {
    {"T4", "Tesla T4", 7, 5, 40, 14.56, 65536, 65536, 1024, 16},
    {"A100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 79.15, 166912, 167936, 2048, 32},
    {"L4", "NVIDIA L4", 8, 9, 58, 22.03, 101376, 102400, 1536, 24},
    {"RTX4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 23.52, 101376, 102400, 1536, 24},
    {"H100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 79.10, 232448, 233472, 2048, 32},
    {"B200", "NVIDIA B200", 10, 0, 148, 178.0, 232448, 233472, 2048, 32},
};

const Card& card() {
  static const Card* chosen = [] {
    const char* wanted = getenv("PRETENDED_GPU") ? getenv("PRETENDED_GPU") : "H100";
    for (auto& c : kCards)
      if (!strcmp(wanted, c.key)) return &c;
    fprintf(stderr, "PRETENDED_GPU=%s: expected T4, A100, L4, RTX4090, H100 or B200\n", wanted);
    abort();
  }();
  return *chosen;
}
size_t total_bytes() {
  static size_t n = (getenv("PRETENDED_GPU_GIB") ? atof(getenv("PRETENDED_GPU_GIB")) : card().gib) * (1ull << 30);
  return n;
}
size_t most_touched() {
  static size_t n = getenv("PRETENDED_GPU_TOUCH") ? strtoull(getenv("PRETENDED_GPU_TOUCH"), nullptr, 10) : SIZE_MAX;
  return n;
}
size_t most_pinned = SIZE_MAX;
bool is_set(const char* name) { return getenv(name) && atoi(getenv(name)); }
bool& is_late() {
  static bool b = is_set("PRETENDED_GPU_LATE");
  return b;
}
bool counts_names() {
  static bool b = is_set("PRETENDED_GPU_NAMES");
  return b;
}
FILE* log_file() {
  static FILE* f = getenv("PRETENDED_GPU_LOG") ? fopen(getenv("PRETENDED_GPU_LOG"), "w") : nullptr;
  return f;
}
#define LOG(...)                 \
  do {                           \
    if (FILE* f = log_file()) {  \
      fprintf(f, __VA_ARGS__);   \
      fputc('\n', f);            \
      fflush(f);                 \
    }                            \
  } while (0)

double slept_ms = 0;  // that kernels were asked to wait
double now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6 + slept_ms;
}

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// counters.py reads these in this order.
struct Counters {
  unsigned long long kernels, host_waits, copies, copied_bytes, device_mallocs, pinned_bytes, used_bytes, peak_bytes,
      late_ops, graph_launches, graph_kernels;
} count;
thread_local cudaError_t last_error = cudaSuccess;

// Tables are never destroyed: libraries call until the process ends.
template <class T, int kNumber = 0>
T& forever() {
  static T* table = new T;
  return *table;
}

// Memory: where it begins, how long it is, and what it is.
enum Kind { DEVICE, PINNED, MANAGED };
struct Range {
  size_t bytes;
  Kind kind;
};
std::map<uintptr_t, Range>& ranges() { return forever<std::map<uintptr_t, Range>>(); }

Range* find(const void* p, uintptr_t* base = nullptr) {
  auto it = ranges().upper_bound((uintptr_t)p);
  if (it == ranges().begin()) return nullptr;
  --it;
  if (base) *base = it->first;
  return (uintptr_t)p < it->first + it->second.bytes ? &it->second : nullptr;
}
const char* kind_of(const Range* r) { return !r ? "pageable" : r->kind == PINNED ? "pinned" : "device"; }

void* map_bytes(size_t n, size_t align = 1 << 21) {
  size_t mapped = n + align;
  char* p = (char*)mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  char* start = (char*)(((uintptr_t)p + align - 1) / align * align);
  char* end = (char*)(((uintptr_t)(start + n) + 4095) / 4096 * 4096);
  if (start > p) munmap(p, start - p);
  if (end < p + mapped) munmap(end, p + mapped - end);
  return start;
}
bool take(size_t n) {
  if (count.used_bytes + n > total_bytes()) return false;
  count.used_bytes += n;
  count.peak_bytes = std::max(count.peak_bytes, count.used_bytes);
  return true;
}
void copy_bytes(void* to, const void* from, size_t n) {
  if (n <= most_touched()) memmove(to, from, n);
}

// Streams: the default one does everything at once. Where they are late the others keep a queue, which is worked off only
// as far as someone waits for an event in it.
struct Stream;
using Clock = std::map<int, unsigned long long>;  // how much of each stream has been done, by its number
struct Event {
  unsigned long long recorded = 0, done = 0;
  Stream* stream = nullptr;
  double ms = 0;
  Clock clock;
};
struct Op {
  std::function<void()> run;
  Event* ends = nullptr;
  unsigned long long number = 0;
};
struct Stream {
  std::deque<Op> queue;
  int id = 0;
  Clock clock;
};
std::vector<Stream*>& streams() { return forever<std::vector<Stream*>>(); }
Stream* default_stream() { return &forever<Stream>(); }
Stream* stream_of(cudaStream_t s) { return (uintptr_t)s <= 2 ? default_stream() : (Stream*)s; }  // 1, 2: default as well

void do_next(Stream* s) {
  Op op = std::move(s->queue.front());
  s->queue.pop_front();
  if (op.run) op.run();
  if (op.ends) op.ends->done = std::max(op.ends->done, op.number);
}
void finish(Stream* s) {
  while (!s->queue.empty()) do_next(s);
}
void finish_all() {
  for (auto* s : streams()) finish(s);
}
void finish_until(Event* e, unsigned long long number) {
  while (e->done < number && e->stream && !e->stream->queue.empty()) do_next(e->stream);
}
void enqueue(cudaStream_t handle, std::function<void()> run, Event* ends = nullptr, unsigned long long number = 0) {
  Stream* s = stream_of(handle);
  if (is_late() && s != default_stream()) {
    s->queue.push_back({std::move(run), ends, number});
    count.late_ops++;
    return;
  }
  if (run) run();
  if (ends) ends->done = std::max(ends->done, number);
}

// CUDA graphs: while a stream is captured, kernels are counted as the graph's, and copies, fills and what computes the kernels' values
// (device_values.py) are kept, to be done when the graph is launched. A wait makes the capture fail. One capture at a time.
struct Graph {
  std::vector<std::function<void(cudaStream_t)>> ops;
  unsigned long long kernels = 0;
};
std::shared_ptr<Graph> captured;
Stream* captured_stream = nullptr;
bool capture_failed = false;
thread_local bool captures = false;  // this thread has begun the capture
thread_local bool in_graph = false;  // a graph is launched
unsigned long long capture_id = 0;
bool is_captured(cudaStream_t s) { return captured && stream_of(s) == captured_stream; }

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

// Returns whether a capture forbids it. In relaxed mode the thread may wait for work that is not captured, and other threads always.
[[nodiscard]] bool host_waits(const char* why, cudaStream_t for_stream = nullptr) {
  LOG("host waits: %s", why);
  bool is_allowed = (!captures || capture_mode == cudaStreamCaptureModeRelaxed) && !is_captured(for_stream);
  if (captured && !is_allowed) return capture_failed = true;
  count.host_waits++;
  return false;
}
cudaError_t forbidden() { return last_error = cudaErrorStreamCaptureUnsupported; }

// Races, where they are watched for: two accesses to a byte, one of them a write, that no wait puts in an order. Each
// stream has a clock of what is known to be done when its next work begins (vector clocks: Lamport 1978, Mattern 1988; as
// ThreadSanitizer has them for threads), the host another, and each piece of memory its last write and the reads since.
// What orders nothing on a GPU orders nothing here: that work was asked for earlier, or happens to be done.
struct Access {
  int stream;
  unsigned long long time;
  const char* what;
};
struct Piece {
  uintptr_t end;
  std::vector<Access> writes, reads;  // at most one write; of reads one a stream
};
struct Work {
  Stream* stream;
  const char* what;
};
bool watches_races = false;
Clock host_clock;
std::map<uintptr_t, Piece>& pieces() { return forever<std::map<uintptr_t, Piece>>(); }
std::set<std::string>& races() { return forever<std::set<std::string>>(); }

void learn(Clock& clock, const Clock& other) {
  for (auto [stream, time] : other) clock[stream] = std::max(clock[stream], time);
}
bool knows(const Clock& clock, const Clock& other) {
  for (auto [stream, time] : other) {
    auto it = clock.find(stream);
    if (it == clock.end() || it->second < time) return false;
  }
  return true;
}
void host_learns_all() {
  learn(host_clock, default_stream()->clock);
  for (auto* s : streams()) learn(host_clock, s->clock);
}
Work begin_work(cudaStream_t handle, const char* what) {
  Stream* s = stream_of(handle);
  if (watches_races) {
    learn(s->clock, host_clock);
    s->clock[s->id]++;
  }
  return {s, what};
}
// The piece that begins at p; a longer one is cut in two there.
std::map<uintptr_t, Piece>::iterator cut(uintptr_t p) {
  auto it = pieces().lower_bound(p);
  if (it != pieces().begin() && (it == pieces().end() || it->first != p)) {
    auto before = std::prev(it);
    if (before->second.end > p) {
      it = pieces().emplace_hint(it, p, before->second);
      before->second.end = p;
    }
  }
  return it;
}
void access(const Work& work, const void* start, size_t n, bool is_write) {
  if (!watches_races || !n) return;
  Clock& clock = work.stream->clock;
  Access mine{work.stream->id, clock[work.stream->id], work.what};
  auto check = [&](const std::vector<Access>& others, const char* did) {
    for (auto& other : others)
      if (other.stream != mine.stream && clock[other.stream] < other.time)
        races().insert(std::string(mine.what) + " on stream " + std::to_string(mine.stream) + (is_write ? " writes" : " reads") +
                       " what " + other.what + " on stream " + std::to_string(other.stream) + " " + did +
                       ", and has not waited for it");
  };
  uintptr_t p = (uintptr_t)start, end = p + n;
  cut(end);
  for (auto it = cut(p); p < end; ++it) {
    if (it == pieces().end() || it->first > p) {  // nothing is known of what lies before the next piece
      uintptr_t next = it == pieces().end() ? end : std::min(end, it->first);
      it = pieces().emplace_hint(it, p, Piece{next, {}, {}});
    }
    Piece& piece = it->second;
    check(piece.writes, "wrote");
    if (is_write) {
      check(piece.reads, "reads");
      piece.writes = {mine};
      piece.reads.clear();
    } else {
      auto same = std::find_if(piece.reads.begin(), piece.reads.end(), [&](auto& r) { return r.stream == mine.stream; });
      if (same == piece.reads.end()) piece.reads.push_back(mine);
      else *same = mine;
    }
    p = piece.end;
  }
}
void forget_memory(const void* start, size_t n) {
  if (!watches_races) return;
  auto last = cut((uintptr_t)start + n);
  pieces().erase(cut((uintptr_t)start), last);
}

// Kernels: counted, by name if that is asked for.
std::unordered_map<const void*, std::string>& names() { return forever<std::unordered_map<const void*, std::string>>(); }
std::map<std::string, unsigned long long>& launches() { return forever<std::map<std::string, unsigned long long>>(); }
void name_kernel(const void* kernel, const char* name) {
  Lock lock(mutex);
  if (counts_names()) names()[kernel] = name;
}
cudaError_t launch(const void* kernel) {
  Lock lock(mutex);
  if (captured && captures) return captured->kernels++, cudaSuccess;
  count.kernels++;
  if (counts_names()) {
    auto it = names().find(kernel);
    launches()[it == names().end() ? "?" : it->second]++;
  }
  return cudaSuccess;
}
cudaError_t launch_library(const char* name) {
  Lock lock(mutex);
  if (captured && captures) return captured->kernels++, cudaSuccess;
  count.kernels++;
  if (counts_names()) launches()[name]++;
  return cudaSuccess;
}

int attribute(int which) {
  const Card& c = card();
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrMultiProcessorCount: return c.sms;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return c.threads_sm;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return c.blocks_sm;
    case cudaDevAttrComputeCapabilityMajor: return c.major;
    case cudaDevAttrComputeCapabilityMinor: return c.minor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return c.smem_sm;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return c.smem_optin;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrPageableMemoryAccess:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
  }
}

}  // namespace

// For tests, through ctypes (counters.py) ---------------------------------------------------------------------------

static thread_local Work kernel;  // that the values of are being computed

API void pretended_counters(unsigned long long* out) {
  Lock lock(mutex);
  memcpy(out, &count, sizeof count);
}
API void pretended_reset_counters() {
  Lock lock(mutex);
  auto used = count.used_bytes, pinned = count.pinned_bytes;
  count = {};
  count.used_bytes = count.peak_bytes = used;
  count.pinned_bytes = pinned;
  launches().clear();
}
API void pretended_limit_pinned(size_t n) {
  Lock lock(mutex);
  most_pinned = n;
}
API void pretended_sleep(double ms) {
  Lock lock(mutex);
  slept_ms += ms;
}
// For order.py: late streams, and races.
API void pretended_be_late(int wanted) {
  Lock lock(mutex);
  finish_all();
  is_late() = wanted;
}
API void pretended_watch_races(int wanted) {
  Lock lock(mutex);
  watches_races = wanted;
  pieces().clear();
  races().clear();
}
API void pretended_begin_kernel(void* stream, const char* name) {
  Lock lock(mutex);
  kernel = begin_work((cudaStream_t)stream, forever<std::set<std::string>, 1>().insert(name).first->c_str());
}
API void pretended_access(const void* start, size_t n, int is_write) {
  Lock lock(mutex);
  if (find(start)) access(kernel, start, n, is_write);
}
void host_access(const void* start, size_t n, bool is_write) {
  static Stream host{{}, -1, {}};
  host.clock = host_clock;
  host.clock[host.id] = ++host_clock[host.id];
  access({&host, "the host"}, start, n, is_write);
}
API void pretended_host_access(const void* start, size_t n, int is_write) {
  Lock lock(mutex);
  if (find(start)) host_access(start, n, is_write);
}
API void pretended_write_races(const char* path) {
  Lock lock(mutex);
  FILE* f = fopen(path, "w");
  if (!f) return;
  for (auto& race : races()) fprintf(f, "%s\n", race.c_str());
  fclose(f);
}
API void pretended_write_launches(const char* path) {
  Lock lock(mutex);
  FILE* f = fopen(path, "w");
  if (!f) return;
  for (auto& [name, n] : launches()) fprintf(f, "%llu %s\n", n, name.c_str());
  fclose(f);
}

// The runtime's registrations and launches --------------------------------------------------------------------------

API void** __cudaRegisterFatBinary(void*) { return (void**)calloc(1, 64); }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  name_kernel(host, name);
}
static std::unordered_map<const void*, size_t>& symbol_bytes() { return forever<std::unordered_map<const void*, size_t>>(); }
API void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t n, int, int) {
  Lock lock(mutex);
  symbol_bytes()[host] = n;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* f) {
  *kernel = (cudaKernel_t)f;
  return cudaSuccess;
}
struct LaunchConfig {
  dim3 grid, block;
  size_t smem;
  cudaStream_t stream;
};
static thread_local std::vector<LaunchConfig> launch_configs;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem, cudaStream_t s) {
  launch_configs.push_back({grid, block, smem, s});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* smem, void* s) {
  LaunchConfig c = launch_configs.back();
  launch_configs.pop_back();
  *grid = c.grid;
  *block = c.block;
  *smem = c.smem;
  *(cudaStream_t*)s = c.stream;
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3, dim3, void**, size_t, cudaStream_t) { return launch(k); }
API cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t) { return launch(f); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* f, void**) { return launch(f); }
API cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t) { return launch(f); }

// Devices -----------------------------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* d) {
  *d = 0;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int d) { return d == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
API cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  *v = attribute(a);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int) {
  snprintf(s, n, "0000:01:00.0");
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  const Card& c = card();
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", c.name);
  p->totalGlobalMem = total_bytes();
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = c.major;
  p->minor = c.minor;
  p->textureAlignment = 512;
  p->multiProcessorCount = c.sms;
  p->pciBusID = 1;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 50 << 20;
  p->persistingL2CacheMaxSize = 30 << 20;
  p->maxThreadsPerMultiProcessor = c.threads_sm;
  p->maxBlocksPerMultiProcessor = c.blocks_sm;
  p->sharedMemPerMultiprocessor = c.smem_sm;
  p->sharedMemPerBlockOptin = c.smem_optin;
  p->reservedSharedMemPerBlock = 1024;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
  p->managedMemory = p->pageableMemoryAccess = p->concurrentManagedAccess = 1;
  p->cooperativeLaunch = p->memoryPoolsSupported = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  Lock lock(mutex);
  if (host_waits("cudaDeviceSynchronize")) return forbidden();
  finish_all();
  host_learns_all();
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() {
  auto e = last_error;
  last_error = cudaSuccess;
  return e;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorMemoryAllocation             ? "out of memory"
         : e == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing"
         : e == cudaErrorStreamCaptureInvalidated ? "operation failed due to a previous error during capture"
         : e == cudaSuccess                       ? "no error"
                                                  : "pretended error";
}
API const char* cudaGetErrorName(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  const Card& c = card();
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  // 8.6 is the newest of its generation that the wheels are built for.
  a->binaryVersion = a->ptxVersion = c.major == 8 && c.minor > 6 ? 86 : c.major * 10 + c.minor;
  a->maxDynamicSharedSizeBytes = c.smem_optin;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}

// Memory ------------------------------------------------------------------------------------------------------------

API cudaError_t cudaMalloc(void** p, size_t n) {
  Lock lock(mutex);
  n = std::max<size_t>(n, 1);
  if (!take(n)) return last_error = cudaErrorMemoryAllocation;
  count.device_mallocs++;
  *p = map_bytes(n);
  ranges()[(uintptr_t)*p] = {n, DEVICE};
  LOG("cudaMalloc %zu", n);
  return cudaSuccess;
}
API cudaError_t cudaFree(void* p) {
  Lock lock(mutex);
  if (!p) return cudaSuccess;
  finish_all();
  host_learns_all();
  auto it = ranges().find((uintptr_t)p);
  if (it == ranges().end()) return last_error = cudaErrorInvalidValue;
  forget_memory(p, it->second.bytes);
  if (it->second.kind == DEVICE) count.used_bytes -= it->second.bytes;
  munmap(p, it->second.bytes);
  ranges().erase(it);
  return cudaSuccess;
}
API cudaError_t cudaMallocManaged(void** p, size_t n, unsigned) {
  Lock lock(mutex);
  *p = map_bytes(n);
  ranges()[(uintptr_t)*p] = {n, MANAGED};
  LOG("cudaMallocManaged %zu", n);
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  Lock lock(mutex);
  n = std::max<size_t>(n, 1);
  if (count.pinned_bytes + n > most_pinned) return last_error = cudaErrorMemoryAllocation;
  *p = map_bytes(n, 4096);
  ranges()[(uintptr_t)*p] = {n, PINNED};
  count.pinned_bytes += n;
  LOG("cudaHostAlloc %zu", n);
  return cudaSuccess;
}
API cudaError_t cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
API cudaError_t cudaFreeHost(void* p) {
  Lock lock(mutex);
  finish_all();
  host_learns_all();
  auto it = ranges().find((uintptr_t)p);
  if (it == ranges().end()) return cudaSuccess;
  forget_memory(p, it->second.bytes);
  count.pinned_bytes -= it->second.bytes;
  munmap(p, it->second.bytes);
  ranges().erase(it);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  Lock lock(mutex);
  if (count.pinned_bytes + n > most_pinned) return last_error = cudaErrorMemoryAllocation;
  ranges()[(uintptr_t)p] = {n, PINNED};
  count.pinned_bytes += n;
  LOG("cudaHostRegister %zu", n);
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  Lock lock(mutex);
  auto it = ranges().find((uintptr_t)p);
  if (it == ranges().end()) return last_error = cudaErrorInvalidValue;
  host_access(p, it->second.bytes, true);  // whose memory it is from now on
  finish_all();                            // what is late would come to memory that is gone
  forget_memory(p, it->second.bytes);
  count.pinned_bytes -= it->second.bytes;
  ranges().erase(it);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(mutex);
  *total = total_bytes();
  *free = *total - count.used_bytes;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Lock lock(mutex);
  memset(a, 0, sizeof *a);
  Range* r = find(p);
  a->type = !r                   ? cudaMemoryTypeUnregistered
            : r->kind == DEVICE  ? cudaMemoryTypeDevice
            : r->kind == PINNED  ? cudaMemoryTypeHost
                                 : cudaMemoryTypeManaged;
  if (r) a->devicePointer = (void*)p;
  if (r && r->kind != DEVICE) a->hostPointer = (void*)p;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t s) {
  Lock lock(mutex);
  if (!n) return cudaSuccess;
  Range *target = find(to), *source = find(from);
  if (is_captured(s) && target && source) {
    captured->ops.push_back([=](cudaStream_t s) { cudaMemcpyAsync(to, from, n, kind, s); });
    return cudaSuccess;
  }
  if (!in_graph) {
    count.copies++;
    count.copied_bytes += n;
  }
  LOG("copy %zu %s -> %s on stream %d", n, kind_of(source), kind_of(target), stream_of(s)->id);
  Work work = begin_work(s, "a copy");
  if (source) access(work, from, n, false);
  if (target) access(work, to, n, true);
  if (!target) {
    if (host_waits("copy to pageable memory")) return forbidden();
    finish(stream_of(s));
    learn(host_clock, stream_of(s)->clock);
    copy_bytes(to, from, n);
    return cudaSuccess;
  }
  if (!source) {
    if (target->kind == DEVICE && host_waits("copy from pageable memory")) return forbidden();  // until it is staged
    if (is_late() && stream_of(s) != default_stream()) {
      auto staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + n);
      enqueue(s, [=] { copy_bytes(to, staged->data(), n); });
      return cudaSuccess;
    }
  }
  enqueue(s, [=] { copy_bytes(to, from, n); });
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  Lock lock(mutex);
  if (host_waits("cudaMemcpy")) return forbidden();
  Work work = begin_work(nullptr, "a copy");
  if (find(from)) access(work, from, n, false);
  if (find(to)) access(work, to, n, true);
  learn(host_clock, default_stream()->clock);
  copy_bytes(to, from, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) {
  return cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, s);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t rows, cudaMemcpyKind kind, cudaStream_t s) {
  Lock lock(mutex);
  if (is_captured(s)) {
    captured->ops.push_back([=](cudaStream_t s) { cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, kind, s); });
    return cudaSuccess;
  }
  Work work = begin_work(s, "a copy");
  for (size_t i = 0; i < rows; i++) {
    access(work, (const char*)from + i * from_pitch, width, false);
    access(work, (char*)to + i * to_pitch, width, true);
  }
  enqueue(s, [=] {
    for (size_t i = 0; i < rows; i++) copy_bytes((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width);
  });
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t s) {
  Lock lock(mutex);
  if (is_captured(s)) {
    captured->ops.push_back([=](cudaStream_t s) { cudaMemsetAsync(p, v, n, s); });
    return cudaSuccess;
  }
  access(begin_work(s, "a fill"), p, n, true);
  enqueue(s, [=] {
    if (n <= most_touched()) memset(p, v, n);
  });
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* p, int v, size_t n) { return cudaMemsetAsync(p, v, n, nullptr); }
API cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t) { return cudaSuccess; }
static void* symbol(const void* s) {
  Lock lock(mutex);
  void*& p = forever<std::unordered_map<const void*, void*>>()[s];
  if (!p) p = calloc(1, std::max<size_t>(symbol_bytes()[s], 4096));
  return p;
}
API cudaError_t cudaGetSymbolAddress(void** p, const void* s) {
  *p = symbol(s);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void* s, const void* from, size_t n, size_t offset, cudaMemcpyKind) {
  memcpy((char*)symbol(s) + offset, from, n);
  return cudaSuccess;
}

// Streams and events ------------------------------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  Lock lock(mutex);
  auto* made = new Stream{{}, (int)streams().size() + 1};
  streams().push_back(made);
  *s = (cudaStream_t)made;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) {
  Lock lock(mutex);
  finish(stream_of(s));
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  Lock lock(mutex);
  if (host_waits("cudaStreamSynchronize", s)) return forbidden();
  finish(stream_of(s));
  learn(host_clock, stream_of(s)->clock);
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t s) {
  Lock lock(mutex);
  bool is_known = !watches_races || knows(host_clock, stream_of(s)->clock);
  return is_known && stream_of(s)->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  Lock lock(mutex);
  *status = !is_captured(s)    ? cudaStreamCaptureStatusNone
            : capture_failed ? cudaStreamCaptureStatusInvalidated
                             : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                         size_t* n) {
  Lock lock(mutex);
  if (status) cudaStreamIsCapturing(s, status);
  if (id) *id = is_captured(s) ? capture_id : 0;
  if (graph) *graph = is_captured(s) ? (cudaGraph_t)captured.get() : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  Lock lock(mutex);
  if (captured || stream_of(s) == default_stream()) return forbidden();
  captured = std::make_shared<Graph>();
  captured_stream = stream_of(s);
  capture_failed = false;
  captures = true;
  capture_id++;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  Lock lock(mutex);
  if (!is_captured(s)) return forbidden();
  *graph = capture_failed ? nullptr : (cudaGraph_t) new std::shared_ptr<Graph>(captured);
  captured = nullptr;
  captures = false;
  return capture_failed ? last_error = cudaErrorStreamCaptureInvalidated : cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) {
  auto& g = *(std::shared_ptr<Graph>*)graph;
  *n = g->kernels + g->ops.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = (cudaGraphExec_t) new std::shared_ptr<Graph>(*(std::shared_ptr<Graph>*)graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete (std::shared_ptr<Graph>*)graph;
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return cudaGraphDestroy((cudaGraph_t)exec); }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  auto graph = *(std::shared_ptr<Graph>*)exec;
  {
    Lock lock(mutex);
    count.graph_launches++;
    count.graph_kernels += graph->kernels;
  }
  in_graph = true;
  for (auto& op : graph->ops) op(s);  // without the lock: some are Python functions
  in_graph = false;
  return cudaSuccess;
}
// Adds a function to the graph that is captured, for the values of its kernels.
API void pretended_capture(void (*f)(unsigned long long), unsigned long long number) {
  Lock lock(mutex);
  if (captured) captured->ops.push_back([=](cudaStream_t) { f(number); });
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* data) {
  Lock lock(mutex);
  if (is_captured(s)) {
    captured->ops.push_back([=](cudaStream_t s) { cudaLaunchHostFunc(s, f, data); });
    return cudaSuccess;
  }
  enqueue(s, [=] { f(data); });
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* data, unsigned) {
  Lock lock(mutex);
  enqueue(s, [=] { f(s, cudaSuccess, data); });
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  *e = (cudaEvent_t) new Event;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // kept: a queue may name it
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t s, unsigned) {
  Lock lock(mutex);
  if (is_captured(s)) return cudaSuccess;
  auto* e = (Event*)handle;
  e->stream = stream_of(s);
  e->ms = now_ms();
  e->recorded++;
  e->clock = stream_of(s)->clock;
  enqueue(s, nullptr, e, e->recorded);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t handle, unsigned) {
  Lock lock(mutex);
  auto* e = (Event*)handle;
  auto number = e->recorded;
  if (watches_races) learn(stream_of(s)->clock, e->clock);
  enqueue(s, [=] { finish_until(e, number); });
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Lock lock(mutex);
  auto* e = (Event*)handle;
  // Where races are watched for, nothing is done before someone has waited for it.
  bool is_known = !watches_races || knows(host_clock, e->clock);
  return is_known && e->done >= e->recorded ? cudaSuccess : (last_error = cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Lock lock(mutex);
  if (host_waits("cudaEventSynchronize")) return forbidden();
  auto* e = (Event*)handle;
  finish_until(e, e->recorded);
  learn(host_clock, e->clock);
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = std::max(1e-3, ((Event*)b)->ms - ((Event*)a)->ms);
  return cudaSuccess;
}

// The driver --------------------------------------------------------------------------------------------------------

struct Physical {
  size_t bytes;
};
static char context[64];
API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* v) {
  *v = 13000;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* n) {
  *n = 1;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* d, int) {
  *d = 0;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetName(char* s, int n, CUdevice) {
  snprintf(s, n, "%s", card().name);
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) {
  *v = attribute((int)a);
  return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t* n, CUdevice) {
  *n = total_bytes();
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) {
  *c = (CUcontext)context;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* c) {
  *c = (CUcontext)context;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* d) {
  *d = 0;
  return CUDA_SUCCESS;
}
API CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxPopCurrent_v2(CUcontext* c) {
  if (c) *c = (CUcontext)context;
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule* m, const void*) {
  *m = (CUmodule)calloc(1, 16);
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadDataEx(CUmodule* m, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(m, image);
}
API CUresult cuModuleLoad(CUmodule* m, const char*) { return cuModuleLoadData(m, nullptr); }
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* f, CUmodule, const char* name) {
  *f = (CUfunction)strdup(name);
  name_kernel(*f, name);
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuLaunchKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                            void**, void**) {
  return (CUresult)launch(f);
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction f, void**, void**) { return (CUresult)launch(f); }
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                       CUstream, void**) {
  return (CUresult)launch(f);
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) {
  *n = 2;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 8;
  return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute a, CUdeviceptr p) {
  Lock lock(mutex);
  Range* r = find((void*)p);
  switch (a) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      if (!r) return CUDA_ERROR_INVALID_VALUE;
      *(CUdeviceptr*)out = p;
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned*)out = r && r->kind != DEVICE ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext*)out = (CUcontext)context; break;
    default: memset(out, 0, 4);
  }
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult e, const char** s) {
  *s = e == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "pretended error";
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult, const char** s) {
  *s = "CUDA_ERROR";
  return CUDA_SUCCESS;
}
API CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
// What expandable segments are made of: addresses, and physical memory that is put behind them.
API CUresult cuMemGetAllocationGranularity(size_t* g, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *g = 1 << 21;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
  Lock lock(mutex);
  void* mapped = map_bytes(n);
  if (!mapped) return CUDA_ERROR_OUT_OF_MEMORY;
  ranges()[(uintptr_t)mapped] = {n, DEVICE};
  *p = (CUdeviceptr)mapped;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
  Lock lock(mutex);
  munmap((void*)p, n);
  ranges().erase((uintptr_t)p);
  return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp*, unsigned long long) {
  Lock lock(mutex);
  if (!take(n)) return CUDA_ERROR_OUT_OF_MEMORY;
  count.device_mallocs++;
  *h = (CUmemGenericAllocationHandle) new Physical{n};
  LOG("cuMemCreate %zu", n);
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
  Lock lock(mutex);
  count.used_bytes -= ((Physical*)h)->bytes;
  delete (Physical*)h;
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) { return CUDA_SUCCESS; }
API CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
  Lock lock(mutex);
  finish_all();
  host_learns_all();
  forget_memory((void*)p, n);
  madvise((void*)p, n, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* n, CUdeviceptr p) {
  Lock lock(mutex);
  uintptr_t start = 0;
  Range* r = find((void*)p, &start);
  if (!r) return CUDA_ERROR_INVALID_VALUE;
  if (base) *base = start;
  if (n) *n = r->bytes;
  return CUDA_SUCCESS;
}
API CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* n, CUdeviceptr p) { return cuMemGetAddressRange_v2(base, n, p); }
static CUresult succeed() { return CUDA_SUCCESS; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) *f = (void*)succeed;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API CUresult cuGetProcAddress_v2(const char* name, void** f, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) *f = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*f) *f = (void*)succeed;
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}

// cuBLAS ------------------------------------------------------------------------------------------------------------

typedef void* Handle;
static int make(Handle* h, size_t n) {
  *h = calloc(1, n);
  return 0;
}
API int cublasCreate_v2(Handle* h) { return make(h, 64); }
API int cublasGetPointerMode_v2(Handle, int* m) {
  *m = 0;
  return 0;
}
API int cublasGetMathMode(Handle, int* m) {
  *m = 0;
  return 0;
}
API int cublasLtCreate(Handle* h) { return make(h, 64); }
API int cublasLtMatmulDescCreate(Handle* d, int, int) { return make(d, 256); }
API int cublasLtMatmulDescDestroy(Handle d) {
  free(d);
  return 0;
}
API int cublasLtMatrixLayoutCreate(Handle* d, int, unsigned long long, unsigned long long, long long) { return make(d, 256); }
API int cublasLtMatrixLayoutDestroy(Handle d) {
  free(d);
  return 0;
}
API int cublasLtMatmulPreferenceCreate(Handle* d) { return make(d, 256); }
API int cublasLtMatmulPreferenceDestroy(Handle d) {
  free(d);
  return 0;
}
API int cublasLtMatmulAlgoGetHeuristic(Handle, Handle, Handle, Handle, Handle, Handle, Handle, int, void* results, int* n) {
  memset(results, 0, 96);
  *n = 1;
  return 0;
}

// NVML, as far as PyTorch's allocator asks it: a device without a fabric ----------------------------------------------

constexpr int kNotSupported = 3;
API int nvmlInit_v2() { return 0; }
API int nvmlInit() { return 0; }
API int nvmlShutdown() { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** d) {
  *d = context;
  return 0;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned, void** d) {
  *d = context;
  return 0;
}
API int nvmlDeviceGetCount_v2(unsigned* n) {
  *n = 1;
  return 0;
}
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* n, void*) {
  *n = 0;
  return 0;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* n, void*) {
  *n = 0;
  return 0;
}
API int nvmlDeviceGetGpuFabricInfoV(void*, void* info) {
  memset((char*)info + 4, 0, 28);
  return 0;
}
API int nvmlDeviceGetGpuFabricInfo() { return kNotSupported; }
API int nvmlDeviceGetNvLinkRemoteDeviceType() { return kNotSupported; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return kNotSupported; }
API int nvmlSystemGetCudaDriverVersion_v2() { return kNotSupported; }
API int nvmlSystemGetDriverVersion() { return kNotSupported; }

// Everything else that the libraries call: build.sh lists it. cuBLAS' functions count as launches; the others succeed and
// do nothing, and the log says that they were called.
#define LAUNCHES(name) \
  API int name() { return launch_library(#name); }
#define SETS(name) \
  API int name() { return 0; }
#define UNEXPECTED(name)                     \
  API int name##_stub() __asm__(#name);      \
  API int name##_stub() {                    \
    LOG("unexpected call of " #name);        \
    return 0;                                \
  }
#include "other_functions.inc"
