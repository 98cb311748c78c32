// The recorder: writes what this process does into a file in shared memory (the ring), which another
// process can read at any time, even if this process hangs, holds the GIL or has died.
//
// The ring holds
// - every collective and point-to-point operation of torch.distributed, on every backend. torch
//   calls each of them through an operator `c10d::…`. This file registers a kernel for the dispatch
//   key BackendSelect of these operators. The dispatcher calls that kernel just before the kernel of
//   the device, in every mode (no_grad, inference_mode, inside backward, from C++ or Python). So the
//   operations of DDP and of functional collectives are recorded, too.
// - steps and phases of the training loop, which recorder.py reports through the functions below.
// - the Python stack of every thread, twice a second. A thread of this file reads the frames without
//   the GIL and without stopping the program. It reads through /proc/self/mem, because frames change
//   while they are read: a stale pointer gives an error there, not a crash.
//
// The layout of the ring is defined by the structs below; ring_reader.py has the same layout.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace {

// ---- the layout of the ring ----------------------------------------------------------------------

constexpr char kMagic[8] = {'t', 'u', 't', 't', 'i', 'o', 'b', 's'};
constexpr uint32_t kVersion = 2;
constexpr uint32_t kOperations = 4096, kSteps = 4096, kGroups = 128, kSites = 1024;
constexpr uint32_t kGroupRanks = 512, kThreads = 8, kFrames = 24, kSiteBytes = 256;

enum Phase : uint32_t { kOther = 0, kInput, kForward, kBackward, kUpdate, kPhases };
enum OperationState : uint8_t { kEntered = 1, kCompleted = 2, kFailed = 3 };

struct Header {
  char magic[8];
  uint32_t version, bytes;  // bytes: the size of the ring
  int64_t pid;
  int32_t rank, world_size, local_rank, worker;  // worker: number of a loader worker, or -1
  int64_t started_realtime_ns, realtime_offset_ns;
  std::atomic<int64_t> sampled_ns;   // when the sampling thread last ran
  std::atomic<uint64_t> operations;  // number of operations that were entered
  std::atomic<uint64_t> completed;   // number of operations that have completed
  std::atomic<uint64_t> steps, batches, loaders_ended;
  std::atomic<int64_t> step_began_ns, phase_began_ns;
  std::atomic<uint32_t> phase, groups, sites, exit_state;  // exit_state: 0 running, 1 ended, 2 error
  std::atomic<int64_t> exit_ns;
  std::atomic<int64_t> gil_beat_ns;  // when a Python thread last ran; old if another thread keeps the GIL
  int64_t parent;                    // process id of the rank, for a loader worker
  char host[64], job[128], boot[40], command[256], error[512], backend[32];
};

struct Group {
  char name[64], description[32], backend[32];
  int32_t rank, size, listed;  // listed: number of entries in `ranks`
  uint32_t collectives;        // number of collectives that were entered
  uint16_t ranks[kGroupRanks];
  // Entries are reused. Operations that were entered before `created_ns` belong to another group.
  int64_t created_ns, used_ns;
};

struct Operation {
  std::atomic<uint64_t> number;  // 0 while the entry is written
  uint32_t group, sequence;
  uint16_t kind, dtype;
  int32_t peer, tag;
  std::atomic<uint8_t> state;
  uint8_t asynchronous, device, reduction;  // asynchronous: the argument async_op of a collective
  uint32_t site, thread, step, dims;
  uint32_t shape[6];
  uint64_t elements;
  int64_t entered_ns;
  std::atomic<int64_t> completed_ns;
};

struct Step {
  std::atomic<uint64_t> number;
  int64_t began_ns, ended_ns, phase_ns[kPhases], collection_ns;
};

struct ThreadSample {
  uint32_t thread, frames;
  char state, name[31];  // state: the letter in /proc/self/task/*/stat
  char system_call[16];  // empty if the thread is running
  char file[192];        // the file or socket of that system call's first argument
  char wait_channel[48];
  char site[kFrames][kSiteBytes];  // innermost first
};

struct Samples {
  std::atomic<uint64_t> version;  // odd while the samples are written
  int64_t sampled_ns;
  uint32_t threads, reserved;
  ThreadSample thread[kThreads];
};

struct Ring {
  Header header;
  char sites[kSites][kSiteBytes];
  Group group[kGroups];
  Operation operation[kOperations];
  Step step[kSteps];
  Samples samples;
};

Ring* g_ring = nullptr;
char g_path[512];
int g_memory = -1;  // /proc/self/mem
PyThreadState* g_main = nullptr;
pthread_t g_main_thread;
std::atomic<bool> g_stop{false};

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

template <size_t N>
void copy_text(char (&target)[N], const char* text) {
  std::snprintf(target, N, "%s", text);
}

// ---- Python frames -------------------------------------------------------------------------------

// The first fields of CPython's _PyInterpreterFrame, which only internal headers declare.
struct Frame {
#if PY_VERSION_HEX < 0x030C0000
  void *function, *globals, *builtins, *locals;
  void* code;
  void* object;
  Frame* previous;
  char* instruction;
#else
  void* code;
  Frame* previous;
  void *function, *globals, *builtins, *locals, *object;
  char* instruction;
#endif
};

constexpr bool kKnownFrames = PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000;

// Two ways to read memory. Direct is for the frames of the calling thread, which cannot change
// meanwhile. Checked is for the frames of other threads.
struct Direct {
  static bool read(void* target, const void* source, size_t bytes) {
    std::memcpy(target, source, bytes);
    return true;
  }
};

struct Checked {
  static bool read(void* target, const void* source, size_t bytes) {
    return pread(g_memory, target, bytes, reinterpret_cast<off_t>(source)) == ssize_t(bytes);
  }
};

template <class Memory>
Frame* current_frame(PyThreadState* thread) {
  Frame* frame = nullptr;
#if PY_VERSION_HEX < 0x030D0000
  char* inner = nullptr;
  if (!Memory::read(&inner, &thread->cframe, sizeof inner) || inner == nullptr) return nullptr;
  if (!Memory::read(&frame, inner + offsetof(_PyCFrame, current_frame), sizeof frame)) return nullptr;
#else
  if (!Memory::read(&frame, &thread->current_frame, sizeof frame)) return nullptr;
#endif
  return frame;
}

// Append a character as UTF-8. Return false if it does not fit.
bool append_utf8(uint32_t letter, char* target, size_t room, size_t* length) {
  char bytes[4];
  size_t count = 1;
  bytes[0] = char(letter);
  if (letter >= 0x80) {
    count = letter < 0x800 ? 2 : letter < 0x10000 ? 3 : 4;
    for (size_t i = count - 1; i > 0; --i, letter >>= 6) bytes[i] = char(0x80 | (letter & 0x3F));
    bytes[0] = char((count == 2 ? 0xC0 : count == 3 ? 0xE0 : 0xF0) | letter);
  }
  if (*length + count >= room) return false;
  std::memcpy(target + *length, bytes, count);
  *length += count;
  return true;
}

// Copy a Python string as UTF-8. If it does not fit, keep its end or its beginning.
template <class Memory>
bool read_text(const void* object, char* target, size_t room, bool keep_end) {
  PyASCIIObject head;
  if (object == nullptr || !Memory::read(&head, object, sizeof head)) return false;
  if (!head.state.compact || head.length < 0 || head.length > 4096) return false;
  const char* data = static_cast<const char*>(object) +
                     (head.state.ascii ? sizeof(PyASCIIObject) : sizeof(PyCompactUnicodeObject));
  size_t kind = head.state.kind, length = head.length;
  size_t first = keep_end && length > room - 1 ? length - (room - 1) : 0;
  size_t count = length - first < room - 1 ? length - first : room - 1;
  uint32_t buffer[kSiteBytes] = {};
  if (kind == 0 || kind > 4 || count > kSiteBytes - 1) return false;
  if (count && !Memory::read(buffer, data + first * kind, count * kind)) return false;
  auto letter = [&](size_t i) {
    return kind == 1   ? reinterpret_cast<uint8_t*>(buffer)[i]
           : kind == 2 ? reinterpret_cast<uint16_t*>(buffer)[i]
                       : buffer[i];
  };
  // A character has up to 4 bytes, so the end of the text may begin later.
  size_t bytes = 0, start = 0;
  for (size_t i = count; keep_end && i > 0; --i) {
    uint32_t code = letter(i - 1);
    bytes += code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    if (bytes > room - 1) {
      start = i;
      break;
    }
  }
  size_t written = 0;
  for (size_t i = start; i < count && append_utf8(letter(i), target, room, &written); ++i) {
  }
  target[written] = 0;
  return true;
}

// Return the line of an instruction, from the location table of its code object (PEP 626).
template <class Memory>
int line_of(const PyCodeObject& code, int64_t unit) {
  PyBytesObject* table = reinterpret_cast<PyBytesObject*>(code.co_linetable);
  Py_ssize_t size = 0;
  if (table == nullptr || !Memory::read(&size, &reinterpret_cast<PyVarObject*>(table)->ob_size, 8))
    return 0;
  if (size <= 0 || size > 1 << 20) return 0;
  thread_local std::vector<uint8_t> bytes;
  bytes.resize(size + 16);
  if (!Memory::read(bytes.data(), table->ob_sval, size)) return 0;
  int line = code.co_firstlineno;
  int64_t at = 0;
  Py_ssize_t i = 0;
  auto varint = [&]() {
    uint32_t value = 0, shift = 0;
    while (i < size) {
      uint8_t byte = bytes[i++];
      value |= uint32_t(byte & 63) << shift;
      shift += 6;
      if (!(byte & 64)) break;
    }
    return value;
  };
  auto signed_varint = [&]() {
    uint32_t value = varint();
    return value & 1 ? -int(value >> 1) : int(value >> 1);
  };
  while (i < size) {
    uint8_t first = bytes[i++];
    int kind = (first >> 3) & 15, length = (first & 7) + 1;
    if (kind < 10) {
      i += 1;
    } else if (kind < 13) {
      line += kind - 10;
      i += 2;
    } else if (kind == 13) {
      line += signed_varint();
    } else if (kind == 14) {
      line += signed_varint();
      varint(), varint(), varint();
    }
    if (unit < at + length) return kind == 15 ? 0 : line;
    at += length;
  }
  return line;
}

struct Site {
  char file[184], name[56];
  int line;
};

template <class Memory>
bool read_site(const Frame& frame, Site* site) {
  PyCodeObject code;
  if (!Memory::read(&code, frame.code, offsetof(PyCodeObject, co_code_adaptive))) return false;
  if (code.ob_base.ob_base.ob_type != &PyCode_Type) return false;
  const char* start = static_cast<const char*>(frame.code) + offsetof(PyCodeObject, co_code_adaptive);
  site->line = line_of<Memory>(code, (frame.instruction - start) / 2);
  return read_text<Memory>(code.co_filename, site->file, sizeof site->file, true) &&
         read_text<Memory>(code.co_name, site->name, sizeof site->name, false);
}

void format_site(const Site& site, char (&target)[kSiteBytes]) {
  std::snprintf(target, kSiteBytes, "%.183s:%d in %.55s", site.file, site.line, site.name);
}

// Libraries are skipped in the search for the line of the program that called an operation.
bool is_library(const char* file) {
  return file[0] == '<' || std::strstr(file, "/site-packages/") || std::strstr(file, "/lib/python3") ||
         std::strstr(file, "/tutti/comm/") || std::strstr(file, "/tutti/observe/") ||
         std::strstr(file, "/tutti/world/") ||
         (std::strstr(file, "/bin/") && !std::strstr(file, ".py"));  // such as bin/torchrun
}

bool is_torch(const char* file) {
  return file[0] == '<' || std::strstr(file, "/torch/") || std::strstr(file, "/tutti/comm/") ||
         std::strstr(file, "/tutti/observe/") || std::strstr(file, "/lib/python3.");
}

struct KnownCode {
  PyObject* file;
  int first_line;
  bool library, torch;
};
struct Call {
  void* code;
  const char* instruction;
  bool operator==(const Call&) const = default;
};
struct CallHash {
  size_t operator()(const Call& call) const {
    return (uintptr_t(call.code) >> 4) * 31 + uintptr_t(call.instruction);
  }
};

// Return the number of the site from which this thread called torch, or 0 if it is unknown.
uint32_t call_site() {
  if (!kKnownFrames) return 0;
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) return 0;
  thread_local std::unordered_map<void*, KnownCode> codes;
  thread_local std::unordered_map<Call, uint32_t, CallHash> sites;
  Frame fallback{}, chosen{};
  Frame* next = current_frame<Direct>(thread);
  for (int depth = 0; next != nullptr && depth < 64; ++depth) {
    Frame frame = *next;
    next = frame.previous;
    if (frame.code == nullptr || Py_TYPE(reinterpret_cast<PyObject*>(frame.code)) != &PyCode_Type)
      continue;
    PyCodeObject* code = static_cast<PyCodeObject*>(frame.code);
    auto known = codes.find(code);
    if (known == codes.end() || known->second.file != code->co_filename ||
        known->second.first_line != code->co_firstlineno) {
      Site site{};
      if (!read_text<Direct>(code->co_filename, site.file, sizeof site.file, true)) continue;
      if (codes.size() > 8192) codes.clear(), sites.clear();
      KnownCode entry{code->co_filename, code->co_firstlineno, is_library(site.file),
                      is_torch(site.file)};
      known = codes.insert_or_assign(code, entry).first;
      if (!entry.library) {  // another code object may have had this address before
        for (auto it = sites.begin(); it != sites.end();)
          it = it->first.code == code ? sites.erase(it) : std::next(it);
      }
    }
    if (!known->second.library) {
      chosen = frame;
      break;
    }
    if (fallback.code == nullptr && !known->second.torch) fallback = frame;
  }
  if (chosen.code == nullptr) chosen = fallback;
  if (chosen.code == nullptr) return 0;
  Call call{chosen.code, chosen.instruction};
  auto found = sites.find(call);
  if (found != sites.end()) return found->second;
  Site site{};
  uint32_t number = 0;
  if (read_site<Direct>(chosen, &site)) {
    Header& header = g_ring->header;
    char text[kSiteBytes];
    format_site(site, text);
    number = header.sites.fetch_add(1) + 1;
    if (number < kSites)
      std::memcpy(g_ring->sites[number], text, kSiteBytes);
    else
      number = 0;
  }
  sites.emplace(call, number);
  return number;
}

// ---- operations ----------------------------------------------------------------------------------

struct Signature {
  int input = -1;    // position of the tensors whose shape is recorded
  int group = -1, peer = -1, tag = -1, reduction = -1, asynchronous = -1;
  uint16_t kind = 0;
  bool point_to_point = false;
};

struct Named {
  const char* name;
  const char* input;
  const char* peer;
  bool point_to_point;
};

// The order is the order of KINDS in ring_reader.py, from 1.
constexpr Named kKinds[] = {
    {"allreduce_", "tensors", "", false},
    {"allreduce_coalesced_", "tensors", "", false},
    {"allgather_", "input_tensors", "", false},
    {"_allgather_base_", "input_tensor", "", false},
    {"allgather_coalesced_", "input_list", "", false},
    {"allgather_into_tensor_coalesced_", "inputs", "", false},
    {"reduce_scatter_", "output_tensors", "", false},
    {"_reduce_scatter_base_", "output_tensor", "", false},
    {"reduce_scatter_tensor_coalesced_", "outputs", "", false},
    {"broadcast_", "tensors", "root_rank", false},
    {"reduce_", "tensors", "root_rank", false},
    {"gather_", "input_tensors", "root_rank", false},
    {"scatter_", "output_tensors", "root_rank", false},
    {"alltoall_", "", "", false},
    {"alltoall_base_", "", "", false},
    {"barrier", "", "", false},
    {"monitored_barrier_", "", "", false},
    {"send", "tensors", "dst", true},
    {"recv_", "tensors", "src", true},
    {"recv_any_source_", "tensors", "", true},
};

// Filled when the kernels are registered and read-only afterwards.
std::unordered_map<const void*, Signature> g_signatures;
std::mutex g_group_mutex;
std::unordered_map<std::string, uint32_t> g_group_numbers;

std::unordered_map<std::string, Group>& g_unlisted_groups = *new std::unordered_map<std::string, Group>;
// The number of a message: messages are counted for each group, peer, tag and direction.
std::mutex g_message_mutex;
std::map<std::tuple<std::string, int32_t, int32_t, uint16_t>, uint32_t> g_messages;

uint32_t next_message(const char* group, int32_t peer, int32_t tag, uint16_t kind) {
  std::lock_guard<std::mutex> lock(g_message_mutex);
  return ++g_messages[{group, peer, tag, kind}];
}

// Return the entry of a group. If the table is full, the group that was used longest ago loses its
// entry. Its counters are kept in g_unlisted_groups. The caller holds g_group_mutex.
uint32_t group_number(const std::string& name) {
  Ring* ring = g_ring;
  auto found = g_group_numbers.find(name);
  if (found != g_group_numbers.end()) return found->second;
  uint32_t number = ring->header.groups.load();
  if (number == kGroups) {
    number = 1;  // entry 0 is the default group, which keeps its entry
    for (uint32_t i = 2; i < kGroups; ++i)
      if (ring->group[i].used_ns < ring->group[number].used_ns) number = i;
    g_unlisted_groups.insert_or_assign(ring->group[number].name, ring->group[number]);
    g_group_numbers.erase(ring->group[number].name);
  }
  Group group{};
  group.rank = group.size = -1;
  auto unlisted = g_unlisted_groups.find(name);
  if (unlisted != g_unlisted_groups.end()) group = unlisted->second;
  copy_text(group.name, name.c_str());
  group.created_ns = group.used_ns = now_ns();
  ring->group[number] = group;
  if (number == ring->header.groups.load()) ring->header.groups.store(number + 1);
  g_group_numbers.emplace(name, number);
  return number;
}

uint32_t group_of(c10d::ProcessGroup& process_group) {
  thread_local std::unordered_map<const void*, uint32_t> known;
  const std::string name = process_group.getGroupName().substr(0, sizeof Group::name - 1);
  auto found = known.find(&process_group);
  if (found != known.end()) {
    Group& group = g_ring->group[found->second];
    if (name == group.name && group.rank >= 0) {  // else the entry was given to another group
      group.used_ns = now_ns();
      return found->second;
    }
  }
  std::lock_guard<std::mutex> lock(g_group_mutex);
  uint32_t number = group_number(name);
  Group& group = g_ring->group[number];
  group.rank = process_group.getRank();
  group.size = process_group.getSize();
  copy_text(group.backend, process_group.getBackendName().c_str());
  copy_text(group.description, process_group.getGroupDesc().c_str());
  if (known.size() > 256) known.clear();
  known.insert_or_assign(&process_group, number);
  return number;
}

void fill_tensor(Operation& operation, const c10::IValue& value) {
  const at::Tensor* first = nullptr;
  at::Tensor holder;
  uint64_t elements = 0;
  if (value.isTensor()) {
    holder = value.toTensor();
    first = &holder;
    elements = holder.numel();
  } else if (value.isTensorList()) {
    auto list = value.toTensorList();
    for (size_t i = 0; i < list.size(); ++i) {
      at::Tensor tensor = list.get(i);
      elements += tensor.numel();
      if (i == 0) holder = tensor, first = &holder;
    }
  }
  if (first == nullptr || !first->defined()) return;
  operation.elements = elements;
  operation.dtype = uint16_t(first->scalar_type()) + 1;
  operation.device = uint8_t(first->device().type());
  operation.dims = uint32_t(first->dim());
  for (int64_t i = 0; i < first->dim() && i < 6; ++i) operation.shape[i] = uint32_t(first->size(i));
}

void complete(Ring* ring, uint32_t slot, uint64_t number, bool failed) {
  if (ring == nullptr || ring != g_ring) return;
  Operation& operation = ring->operation[slot];
  if (operation.number.load(std::memory_order_acquire) != number) return;  // overwritten
  operation.completed_ns.store(now_ns(), std::memory_order_relaxed);
  operation.state.store(failed ? kFailed : kCompleted, std::memory_order_release);
  ring->header.completed.fetch_add(1, std::memory_order_relaxed);
}

// Operations whose Work has no future: the sends and receives of gloo. The sampling thread asks them
// whether they have completed. A weak pointer does not extend the life of the tensors. If nobody
// holds the Work any more, the call that waited for it has returned.
struct Unfinished {
  c10::weak_intrusive_ptr<c10d::Work> work;
  uint32_t slot;
  uint64_t number;
};
// These two are never destroyed, because the sampling thread may use them while the process ends.
std::mutex& g_unfinished_mutex = *new std::mutex;
std::vector<Unfinished>& g_unfinished = *new std::vector<Unfinished>;

void complete_finished(Ring* ring) {
  std::lock_guard<std::mutex> lock(g_unfinished_mutex);
  for (size_t i = 0; i < g_unfinished.size();) {
    c10::intrusive_ptr<c10d::Work> work = g_unfinished[i].work.lock();
    if (work && !work->isCompleted()) {
      ++i;
      continue;
    }
    complete(ring, g_unfinished[i].slot, g_unfinished[i].number, false);
    std::swap(g_unfinished[i], g_unfinished.back());
    g_unfinished.pop_back();
  }
}

void record_operation(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  c10::DispatchKeySet rest = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER,
                                                        c10::DispatchKey::BackendSelect);
  Ring* ring = g_ring;
  const auto found = ring == nullptr ? g_signatures.end() : g_signatures.find(&handle.schema());
  if (found == g_signatures.end()) {
    handle.redispatchBoxed(rest, stack);
    return;
  }
  const Signature& signature = found->second;
  const size_t count = handle.schema().arguments().size();
  auto argument = [&](int position) -> const c10::IValue& {
    return (*stack)[stack->size() - count + position];
  };
  uint64_t number = ring->header.operations.fetch_add(1, std::memory_order_relaxed) + 1;
  uint32_t slot = (number - 1) % kOperations;
  Operation& operation = ring->operation[slot];
  operation.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  operation.kind = signature.kind;
  operation.asynchronous =
      signature.asynchronous >= 0 && argument(signature.asynchronous).toBool() ? 1 : 0;
  operation.peer = operation.tag = -1;
  operation.reduction = operation.device = 0;
  operation.dtype = 0;
  operation.dims = 0;
  operation.elements = 0;
  if (signature.group >= 0) {
    auto process_group = argument(signature.group).toCustomClass<c10d::ProcessGroup>();
    operation.group = group_of(*process_group);
  }
  if (signature.input >= 0) fill_tensor(operation, argument(signature.input));
  if (signature.peer >= 0) operation.peer = int32_t(argument(signature.peer).toInt());
  if (signature.tag >= 0) operation.tag = int32_t(argument(signature.tag).toInt());
  operation.sequence =
      signature.point_to_point
          ? next_message(ring->group[operation.group].name, operation.peer, operation.tag, signature.kind)
          : __atomic_add_fetch(&ring->group[operation.group].collectives, 1, __ATOMIC_RELAXED);
  if (signature.reduction >= 0) {
    auto reduction = argument(signature.reduction).toCustomClass<c10d::ReduceOp>();
    operation.reduction = uint8_t(static_cast<c10d::ReduceOp::RedOpType>(*reduction)) + 1;
  }
  operation.site = call_site();
  thread_local uint32_t thread = uint32_t(syscall(SYS_gettid));
  operation.thread = thread;
  operation.step = uint32_t(ring->header.steps.load(std::memory_order_relaxed));
  operation.completed_ns.store(0, std::memory_order_relaxed);
  operation.entered_ns = now_ns();
  operation.state.store(kEntered, std::memory_order_relaxed);
  operation.number.store(number, std::memory_order_release);
  bool on_host = operation.device == uint8_t(c10::DeviceType::CPU);
  try {
    handle.redispatchBoxed(rest, stack);
  } catch (...) {
    complete(ring, slot, number, true);
    throw;
  }
  const auto& returns = handle.schema().returns();
  if (returns.empty()) {
    complete(ring, slot, number, false);
    return;
  }
  // On CUDA the future of a Work says when the kernel was enqueued, not when it has completed.
  if (!on_host || !stack->back().isCustomClass()) return;
  auto work = stack->back().toCustomClass<c10d::Work>();
  if (!work) return;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = work->getFuture();
  } catch (...) {  // this kind of Work has no future
  }
  if (future) {
    future->addCallback([ring, slot, number](c10::ivalue::Future& done) {
      complete(ring, slot, number, done.hasError());
    });
  } else {
    std::lock_guard<std::mutex> lock(g_unfinished_mutex);
    g_unfinished.push_back({c10::weak_intrusive_ptr<c10d::Work>(work), slot, number});
  }
}

// The registrations stay until the process ends, and do nothing while there is no ring.
void register_kernels() {
  static std::vector<c10::RegistrationHandleRAII> registrations;
  if (!registrations.empty()) return;
  auto& dispatcher = c10::Dispatcher::singleton();
  uint16_t kind = 0;
  for (const Named& named : kKinds) {
    ++kind;
    auto handle = dispatcher.findSchema({std::string("c10d::") + named.name, ""});
    if (!handle) continue;  // an operator of another version of torch
    Signature signature;
    signature.kind = kind;
    signature.point_to_point = named.point_to_point;
    const auto& arguments = handle->schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const std::string& name = arguments[i].name();
      if (name == named.input) signature.input = int(i);
      if (name == named.peer) signature.peer = int(i);
      if (name == "process_group") signature.group = int(i);
      if (name == "tag") signature.tag = int(i);
      if (name == "reduce_op") signature.reduction = int(i);
      if (name == "async_op") signature.asynchronous = int(i);
      // A barrier has a dummy tensor, which shows the device.
      if (signature.input < 0 && name == "tensor" && !*named.input) signature.input = int(i);
    }
    g_signatures.emplace(&handle->schema(), signature);
    registrations.push_back(dispatcher.registerImpl(
        {std::string("c10d::") + named.name, ""}, c10::DispatchKey::BackendSelect,
        c10::KernelFunction::makeFromBoxedFunction<&record_operation>(), std::nullopt, nullptr,
        "tutti.observe"));
  }
}

// ---- the sampling thread -------------------------------------------------------------------------

std::string read_file(const char* path) {
  char buffer[1024];
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return "";
  ssize_t bytes = read(file, buffer, sizeof buffer - 1);
  close(file);
  return bytes > 0 ? std::string(buffer, bytes) : "";
}

struct SystemCall {
  long number;
  const char* name;
  bool takes_file;  // whether the first argument is a file descriptor
};

// The system calls in which a thread may wait. Some architectures have only the newer ones.
constexpr SystemCall kSystemCalls[] = {
    {SYS_read, "read", true},
    {SYS_readv, "read", true},
    {SYS_pread64, "read", true},
    {SYS_write, "write", true},
    {SYS_writev, "write", true},
    {SYS_pwrite64, "write", true},
    {SYS_fsync, "fsync", true},
    {SYS_fdatasync, "fsync", true},
    {SYS_getdents64, "read", true},
    {SYS_recvfrom, "receive", true},
    {SYS_recvmsg, "receive", true},
    {SYS_sendto, "send", true},
    {SYS_sendmsg, "send", true},
    {SYS_connect, "connect", true},
    {SYS_flock, "lock", true},
    {SYS_fcntl, "lock", true},
    {SYS_openat, "open", false},
    {SYS_futex, "futex", false},
    {SYS_nanosleep, "sleep", false},
    {SYS_clock_nanosleep, "sleep", false},
    {SYS_ppoll, "poll", false},
    {SYS_pselect6, "poll", false},
    {SYS_epoll_pwait, "poll", false},
    {SYS_wait4, "wait", false},
    {SYS_waitid, "wait", false},
#ifdef SYS_poll
    {SYS_poll, "poll", false},
    {SYS_select, "poll", false},
    {SYS_epoll_wait, "poll", false},
    {SYS_open, "open", false},
#endif
};

// Read the path of a system call that opens a file. Another page may follow that is not mapped.
void read_path(unsigned long address, char (&path)[192]) {
  ssize_t bytes = pread(g_memory, path, sizeof path - 1, off_t(address));
  path[bytes > 0 ? bytes : 0] = 0;
}

void sample_thread(PyThreadState* thread, uint32_t id, ThreadSample& sample) {
  std::memset(&sample, 0, offsetof(ThreadSample, site));
  sample.thread = id;
  char path[96];
  std::snprintf(path, sizeof path, "/proc/self/task/%u/stat", id);
  std::string text = read_file(path);
  size_t end = text.rfind(')');
  size_t begin = text.find('(');
  if (end != std::string::npos && end + 2 < text.size()) sample.state = text[end + 2];
  if (begin != std::string::npos && end > begin)
    copy_text(sample.name, text.substr(begin + 1, end - begin - 1).c_str());
  std::snprintf(path, sizeof path, "/proc/self/task/%u/syscall", id);
  text = read_file(path);
  long number;
  unsigned long first, second;
  if (std::sscanf(text.c_str(), "%ld %lx %lx", &number, &first, &second) == 3) {
    copy_text(sample.system_call, "other");
    for (const SystemCall& call : kSystemCalls) {
      if (call.number != number) continue;
      copy_text(sample.system_call, call.name);
      if (std::strcmp(call.name, "open") == 0)
        read_path(number == SYS_openat ? second : first, sample.file);
      if (!call.takes_file) break;
      std::snprintf(path, sizeof path, "/proc/self/fd/%lu", first);
      ssize_t bytes = readlink(path, sample.file, sizeof sample.file - 1);
      sample.file[bytes > 0 ? bytes : 0] = 0;
    }
  }
  std::snprintf(path, sizeof path, "/proc/self/task/%u/wchan", id);
  copy_text(sample.wait_channel, read_file(path).c_str());
  Frame* next = kKnownFrames ? current_frame<Checked>(thread) : nullptr;
  uint32_t count = 0;
  for (int depth = 0; next != nullptr && depth < 200 && count < kFrames; ++depth) {
    Frame frame;
    if (!Checked::read(&frame, next, sizeof frame)) break;
    next = frame.previous;
    Site site{};
    if (frame.code == nullptr || !read_site<Checked>(frame, &site) || site.file[0] == '<') continue;
    format_site(site, sample.site[count++]);
  }
  sample.frames = count;
}

void take_samples(Ring* ring) {
  // The samples are collected here and then copied, so that a reader seldom meets half of them.
  static ThreadSample collected[kThreads];
  uint32_t count = 0;
  auto add = [&](PyThreadState* thread) {
    unsigned long id = 0;
    if (count >= kThreads || !Checked::read(&id, &thread->native_thread_id, sizeof id)) return;
    if (id != 0) sample_thread(thread, uint32_t(id), collected[count++]);
  };
  add(g_main);
  // A new thread becomes the head of the interpreter's list, so threads are found through `prev`.
  PyThreadState* thread = g_main;
  for (int i = 0; i < 64; ++i) {
    PyThreadState* previous = nullptr;
    if (!Checked::read(&previous, &thread->prev, sizeof previous) || previous == nullptr) break;
    add(thread = previous);
  }
  Samples& samples = ring->samples;
  uint64_t version = samples.version.load(std::memory_order_relaxed);
  samples.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(samples.thread, collected, sizeof collected);
  samples.threads = count;
  samples.sampled_ns = now_ns();
  samples.version.store(version + 2, std::memory_order_release);
  ring->header.sampled_ns.store(samples.sampled_ns, std::memory_order_release);
}

void sample_until_stopped(Ring* ring) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for the threads of the program
  pthread_setname_np(pthread_self(), "tutti-recorder");
  while (!g_stop.load()) {
    complete_finished(ring);
    take_samples(ring);
    for (int i = 0; i < 10 && !g_stop.load(); ++i) usleep(50000);
  }
}

// ---- functions for recorder.py -------------------------------------------------------------------

// In a forked child, the ring of the parent is not written.
void after_fork() {
  if (g_ring != nullptr) munmap(g_ring, sizeof(Ring));
  g_ring = nullptr;
  // Another thread of the parent may have held a lock, and nobody would ever release the copy.
  new (&g_unfinished_mutex) std::mutex;
  new (&g_group_mutex) std::mutex;
  new (&g_message_mutex) std::mutex;
  new (&g_unfinished) std::vector<Unfinished>;  // these are operations of the parent
}

PyObject* py_open(PyObject*, PyObject* args) {
  const char *path, *host, *job, *boot, *command;
  int rank, world_size, local_rank, worker;
  if (!PyArg_ParseTuple(args, "siiiissss", &path, &rank, &world_size, &local_rank, &worker, &host,
                        &job, &boot, &command))
    return nullptr;
  int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
  // The memory is allocated now: a write to a full /dev/shm would kill the program with SIGBUS.
  if (int error = posix_fallocate(file, 0, sizeof(Ring))) {
    close(file);
    unlink(path);
    errno = error;
    return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
  }
  void* memory = mmap(nullptr, sizeof(Ring), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
  if (g_memory >= 0) close(g_memory);
  g_memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  Ring* ring = static_cast<Ring*>(memory);
  Header& header = ring->header;
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  header.version = kVersion;
  header.bytes = sizeof(Ring);
  header.pid = getpid();
  header.rank = rank;
  header.world_size = world_size;
  header.local_rank = local_rank;
  header.worker = worker;
  header.parent = getppid();
  header.gil_beat_ns.store(now_ns());
  header.started_realtime_ns = time.tv_sec * 1000000000LL + time.tv_nsec;
  header.realtime_offset_ns = header.started_realtime_ns - now_ns();
  header.step_began_ns.store(now_ns());
  header.phase_began_ns.store(now_ns());
  copy_text(header.host, host);
  copy_text(header.job, job);
  copy_text(header.boot, boot);
  copy_text(header.command, command);
  copy_text(g_path, path);
  g_main = PyThreadState_Get();
  g_main_thread = pthread_self();
  {
    std::lock_guard<std::mutex> lock(g_group_mutex);
    g_group_numbers.clear();
    g_unlisted_groups.clear();
  }
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  static bool at_fork = (pthread_atfork(nullptr, nullptr, after_fork), true);
  (void)at_fork;
  g_stop.store(false);
  try {
    std::thread(sample_until_stopped, ring).detach();
  } catch (const std::exception& error) {  // the limit of threads or of memory is reached
    munmap(memory, sizeof(Ring));
    unlink(path);
    PyErr_SetString(PyExc_OSError, error.what());
    return nullptr;
  }
  g_ring = ring;
  register_kernels();
  Py_RETURN_NONE;
}

PyObject* py_set_rank(PyObject*, PyObject* args) {
  int rank, world_size, local_rank;
  const char *job, *backend;
  if (!PyArg_ParseTuple(args, "iiiss", &rank, &world_size, &local_rank, &job, &backend)) return nullptr;
  if (g_ring != nullptr) {
    Header& header = g_ring->header;
    header.rank = rank;
    header.world_size = world_size;
    header.local_rank = local_rank;
    copy_text(header.job, job);
    copy_text(header.backend, backend);
  }
  Py_RETURN_NONE;
}

PyObject* py_set_group(PyObject*, PyObject* args) {
  const char *name, *description;
  PyObject* ranks;
  if (!PyArg_ParseTuple(args, "ssO!", &name, &description, &PyList_Type, &ranks)) return nullptr;
  if (g_ring == nullptr) Py_RETURN_NONE;
  std::lock_guard<std::mutex> lock(g_group_mutex);
  Group& entry = g_ring->group[group_number(name)];
  // After destroy_process_group, a new group may have this name. Its operations count from 1.
  Group group{};
  group.rank = -1;
  copy_text(group.name, name);
  copy_text(group.description, description);
  Py_ssize_t count = PyList_Size(ranks);
  group.listed = int32_t(count < kGroupRanks ? count : kGroupRanks);
  group.size = int32_t(count);
  for (int32_t i = 0; i < group.listed; ++i)
    group.ranks[i] = uint16_t(PyLong_AsLong(PyList_GetItem(ranks, i)));
  if (PyErr_Occurred()) return nullptr;
  group.created_ns = group.used_ns = now_ns();
  entry = group;
  std::lock_guard<std::mutex> message_lock(g_message_mutex);
  std::erase_if(g_messages, [&](const auto& each) { return std::get<0>(each.first) == name; });
  Py_RETURN_NONE;
}

// Nanoseconds of each phase in the current step. Only the main thread changes phases.
int64_t g_phase_ns[kPhases], g_collection_ns;

Phase change_phase(Header& header, Phase phase) {
  int64_t now = now_ns();
  Phase before = Phase(header.phase.load(std::memory_order_relaxed));
  g_phase_ns[before] += now - header.phase_began_ns.load(std::memory_order_relaxed);
  header.phase.store(phase, std::memory_order_relaxed);
  header.phase_began_ns.store(now, std::memory_order_relaxed);
  return before;
}

// enter(phase) -> the phase before, which the caller passes to enter() when the phase ends.
PyObject* py_enter(PyObject*, PyObject* argument) {
  long phase = PyLong_AsLong(argument);
  if (phase < 0 || phase >= kPhases) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "unknown phase");
    return nullptr;
  }
  if (g_ring == nullptr || !pthread_equal(pthread_self(), g_main_thread)) return PyLong_FromLong(phase);
  return PyLong_FromLong(change_phase(g_ring->header, Phase(phase)));
}

PyObject* py_step(PyObject*, PyObject*) {
  if (g_ring == nullptr || !pthread_equal(pthread_self(), g_main_thread)) Py_RETURN_NONE;
  Header& header = g_ring->header;
  change_phase(header, Phase(header.phase.load(std::memory_order_relaxed)));
  uint64_t number = header.steps.load(std::memory_order_relaxed) + 1;
  Step& step = g_ring->step[(number - 1) % kSteps];
  step.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  step.began_ns = header.step_began_ns.load(std::memory_order_relaxed);
  step.ended_ns = now_ns();
  std::memcpy(step.phase_ns, g_phase_ns, sizeof g_phase_ns);
  step.collection_ns = g_collection_ns;
  step.number.store(number, std::memory_order_release);
  std::memset(g_phase_ns, 0, sizeof g_phase_ns);
  g_collection_ns = 0;
  header.step_began_ns.store(step.ended_ns, std::memory_order_relaxed);
  header.steps.store(number, std::memory_order_release);
  Py_RETURN_NONE;
}

PyObject* py_count_batch(PyObject*, PyObject*) {
  if (g_ring != nullptr) g_ring->header.batches.fetch_add(1, std::memory_order_relaxed);
  Py_RETURN_NONE;
}

PyObject* py_count_loader_end(PyObject*, PyObject*) {
  if (g_ring != nullptr) g_ring->header.loaders_ended.fetch_add(1, std::memory_order_relaxed);
  Py_RETURN_NONE;
}

PyObject* py_beat(PyObject*, PyObject*) {
  if (g_ring != nullptr) g_ring->header.gil_beat_ns.store(now_ns(), std::memory_order_relaxed);
  Py_RETURN_NONE;
}

PyObject* py_add_collection(PyObject*, PyObject* argument) {
  long long nanoseconds = PyLong_AsLongLong(argument);
  if (PyErr_Occurred()) return nullptr;
  g_collection_ns += nanoseconds;
  Py_RETURN_NONE;
}

PyObject* py_set_error(PyObject*, PyObject* args) {
  const char* text;
  if (!PyArg_ParseTuple(args, "s", &text)) return nullptr;
  if (g_ring != nullptr && g_ring->header.exit_state.load() != 2) {
    copy_text(g_ring->header.error, text);
    g_ring->header.exit_ns.store(now_ns());
    g_ring->header.exit_state.store(2);
  }
  Py_RETURN_NONE;
}

// Mark the end of the program. The ring stays readable until its file is removed.
PyObject* py_close(PyObject*, PyObject*) {
  g_stop.store(true);
  if (g_ring != nullptr && g_ring->header.exit_state.load() == 0) {
    g_ring->header.exit_ns.store(now_ns());
    g_ring->header.exit_state.store(1);
  }
  Py_RETURN_NONE;
}

// Return the call site of this call, for the self-test in recorder.py.
PyObject* py_own_site(PyObject*, PyObject*) {
  PyThreadState* thread = PyThreadState_Get();
  Frame* frame = kKnownFrames ? current_frame<Checked>(thread) : nullptr;
  Site site{};
  Frame copy;
  char text[kSiteBytes];
  if (frame == nullptr || !Checked::read(&copy, frame, sizeof copy) || !read_site<Checked>(copy, &site))
    return PyUnicode_FromString("");
  format_site(site, text);
  return PyUnicode_FromString(text);
}

PyMethodDef g_methods[] = {
    {"open", py_open, METH_VARARGS, "Create the ring and begin to record."},
    {"set_rank", py_set_rank, METH_VARARGS, "Record rank, world size, local rank, job and backend."},
    {"set_group", py_set_group, METH_VARARGS, "Record the global ranks of a process group."},
    {"enter", py_enter, METH_O, "Enter a phase and return the phase before."},
    {"step", py_step, METH_NOARGS, "Record the end of a training step."},
    {"count_batch", py_count_batch, METH_NOARGS, "Count a batch of a data loader."},
    {"count_loader_end", py_count_loader_end, METH_NOARGS, "Count a data loader that has ended."},
    {"beat", py_beat, METH_NOARGS, "Record that a Python thread could take the GIL."},
    {"add_collection", py_add_collection, METH_O, "Add nanoseconds of garbage collection."},
    {"set_error", py_set_error, METH_VARARGS, "Record the error that ends the program."},
    {"close", py_close, METH_NOARGS, "Record that the program has ended."},
    {"own_site", py_own_site, METH_NOARGS, "Return the source line of this call."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef g_module = {PyModuleDef_HEAD_INIT, "_recorder", nullptr, -1, g_methods,
                        nullptr,               nullptr,     nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) const char tutti_recorder_source[] =
    "tutti-built-from:" TUTTI_SOURCE_HASH ";";

PyMODINIT_FUNC PyInit__recorder(void) {
  PyObject* module = PyModule_Create(&g_module);
  if (module != nullptr) {
    PyModule_AddIntConstant(module, "ring_bytes", sizeof(Ring));
  }
  return module;
}
