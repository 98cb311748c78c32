// `Call` describes one operation and converts torch's tensors to the memory ranges that the core
// reads and writes. `Core` is a table of pointers to the core's functions. The functions are looked
// up at run time in the library file that Python has loaded with ctypes. So Python and this module
// share the same groups, and this module can be rebuilt without the core.
#pragma once

#include <dlfcn.h>

#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

extern "C" {
#include "../core/tutti_shm.h"
}

namespace tutti {

struct Core {
    decltype(&tutti_error) error;
    decltype(&tutti_error_code) error_code;
    decltype(&tutti_group_abort) group_abort;
    decltype(&tutti_group_close) group_close;
    decltype(&tutti_export_alloc) export_alloc;
    decltype(&tutti_export_free) export_free;
    decltype(&tutti_run) run;
    decltype(&tutti_submit) submit;
    decltype(&tutti_work_is_done) work_is_done;
    decltype(&tutti_work_wait) work_wait;
    decltype(&tutti_work_source) work_source;
    decltype(&tutti_work_free) work_free;
};

inline Core core;

inline void load_core(const std::string& path) {
    void* file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(file, "the shared-memory core cannot be loaded: ", dlerror());
    auto find = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(file, name));
        TORCH_CHECK(function, path, " has no function ", name,
                    ". The file was built from other sources. Delete it to rebuild it.");
    };
    decltype(&tutti_abi) abi;
    find(abi, "tutti_abi");
    TORCH_CHECK(abi() == TUTTI_ABI, path, " has ABI ", abi(),
                ", but tutti's C++ extension was built for ABI ", TUTTI_ABI);
    find(core.error, "tutti_error");
    find(core.error_code, "tutti_error_code");
    find(core.group_abort, "tutti_group_abort");
    find(core.group_close, "tutti_group_close");
    find(core.export_alloc, "tutti_export_alloc");
    find(core.export_free, "tutti_export_free");
    find(core.run, "tutti_run");
    find(core.submit, "tutti_submit");
    find(core.work_is_done, "tutti_work_is_done");
    find(core.work_wait, "tutti_work_wait");
    find(core.work_source, "tutti_work_source");
    find(core.work_free, "tutti_work_free");
}

// A failed operation. module.cpp translates it to the exceptions of native.py.
class Failure : public c10::DistBackendError {
   public:
    Failure(int code, std::string text)
        : DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(text)),
          code(code) {}
    const int code;
};

struct Kind {
    uint32_t code;
    c10d::OpType type;
    const char* name;   // name in error messages, and collective name in traces
    const char* title;  // name of the span in traces
};

inline constexpr Kind kAllReduce{TUTTI_ALL_REDUCE, c10d::OpType::ALLREDUCE, "all_reduce",
                                 "shm:all_reduce"};
inline constexpr Kind kReduce{TUTTI_REDUCE, c10d::OpType::REDUCE, "reduce", "shm:reduce"};
inline constexpr Kind kBroadcast{TUTTI_BROADCAST, c10d::OpType::BROADCAST, "broadcast",
                                 "shm:broadcast"};
inline constexpr Kind kAllGather{TUTTI_ALL_GATHER, c10d::OpType::ALLGATHER, "all_gather",
                                 "shm:all_gather"};
inline constexpr Kind kReduceScatter{TUTTI_REDUCE_SCATTER, c10d::OpType::REDUCE_SCATTER,
                                     "reduce_scatter", "shm:reduce_scatter"};
inline constexpr Kind kGather{TUTTI_GATHER, c10d::OpType::GATHER, "gather", "shm:gather"};
inline constexpr Kind kScatter{TUTTI_SCATTER, c10d::OpType::SCATTER, "scatter", "shm:scatter"};
inline constexpr Kind kAllToAll{TUTTI_ALL_TO_ALL, c10d::OpType::ALLTOALL, "all_to_all",
                                "shm:all_to_all"};
inline constexpr Kind kSend{TUTTI_SEND, c10d::OpType::SEND, "send", "shm:send"};
inline constexpr Kind kRecv{TUTTI_RECV, c10d::OpType::RECV, "recv", "shm:recv"};
inline constexpr Kind kBarrier{TUTTI_BARRIER, c10d::OpType::BARRIER, "barrier", "shm:barrier"};

inline uint32_t dtype_code(at::ScalarType type) {
    switch (type) {
        case at::kDouble: return TUTTI_F64;
        case at::kFloat: return TUTTI_F32;
        case at::kHalf: return TUTTI_F16;
        case at::kBFloat16: return TUTTI_BF16;
        case at::kLong: return TUTTI_I64;
        case at::kInt: return TUTTI_I32;
        case at::kShort: return TUTTI_I16;
        case at::kChar: return TUTTI_I8;
        case at::kByte: return TUTTI_U8;
        case at::kBool: return TUTTI_BOOL;
        default: return TUTTI_BYTES;
    }
}

struct Call {
    explicit Call(const Kind& kind) : kind(&kind) {}

    const Kind* kind;
    uint32_t dtype = TUTTI_BYTES, reduce = TUTTI_SUM, tag = 0;
    int32_t root = -1, peer = -1;
    at::ScalarType scalar = at::kByte;
    // The caller's tensors, for the profiler and for result().
    c10::SmallVector<at::Tensor, 1> inputs, outputs;
    // Pairs of a non-contiguous tensor of the caller and the contiguous copy that replaces it
    // during the operation. When the operation is done, the copy is copied back to the caller's
    // tensor.
    c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 1> copies;
    c10::SmallVector<at::Tensor, 1> kept;  // contiguous copies of inputs
    c10::SmallVector<void*, 4> in, out;
    c10::SmallVector<uint64_t, 4> in_bytes, out_bytes;
    std::string where;

    void reads(const at::Tensor& tensor) {
        const at::Tensor& dense = input(tensor);
        add_in(dense.const_data_ptr(), dense.nbytes());
    }

    void writes(const at::Tensor& tensor) {
        const at::Tensor& dense = output(tensor);
        add_out(dense.mutable_data_ptr(), dense.nbytes());
    }

    // For operations in place, which read and write the same memory.
    void updates(const at::Tensor& tensor) {
        check(tensor);
        inputs.push_back(tensor);
        outputs.push_back(tensor);
        const at::Tensor* dense = &tensor;
        if (C10_UNLIKELY(!tensor.is_contiguous())) {
            copies.emplace_back(tensor, copy_of(tensor));
            dense = &copies.back().second;
        }
        void* memory = dense->mutable_data_ptr();
        add_in(memory, dense->nbytes());
        add_out(memory, dense->nbytes());
    }

    // Splits one tensor along its first dimension into one part per rank. The parts are equal, or
    // have rows[rank] rows if `rows` is not empty.
    void reads_split(const at::Tensor& whole, int size, const std::vector<int64_t>& rows = {}) {
        const at::Tensor& dense = input(whole);
        auto* memory = static_cast<const char*>(dense.const_data_ptr());
        for (uint64_t bytes : split(whole, size, rows, "input")) {
            add_in(memory, bytes);
            memory += bytes;
        }
    }

    void writes_split(const at::Tensor& whole, int size, const std::vector<int64_t>& rows = {}) {
        const at::Tensor& dense = output(whole);
        auto* memory = static_cast<char*>(dense.mutable_data_ptr());
        for (uint64_t bytes : split(whole, size, rows, "output")) {
            add_out(memory, bytes);
            memory += bytes;
        }
    }

    void reduces(const c10d::ReduceOp& op) {
        TORCH_CHECK_VALUE(op.op_ <= c10d::ReduceOp::BXOR, "shm ", kind->name,
                    " supports SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR. Instead of PREMUL_SUM, "
                    "multiply the tensor and use SUM.");
        reduce = static_cast<uint32_t>(op.op_);  // the core and torch use the same numbers
        if (scalar == at::kComplexFloat || scalar == at::kComplexDouble) {
            TORCH_CHECK_VALUE(reduce == TUTTI_SUM || reduce == TUTTI_AVG, "shm ", kind->name,
                        ": complex numbers can only be summed or averaged");
            dtype = scalar == at::kComplexFloat ? TUTTI_F32 : TUTTI_F64;
        }
        TORCH_CHECK_VALUE(reduce != TUTTI_AVG || dtype <= TUTTI_BF16 || dtype == TUTTI_BYTES, "shm ", kind->name, ": AVG of ",
                    c10::toString(scalar), " would drop fractions. Use SUM.");
        TORCH_CHECK_TYPE(dtype != TUTTI_BYTES, "shm ", kind->name, " cannot reduce ",
                         c10::toString(scalar), ". Convert the tensor to float64, float32, "
                         "float16, bfloat16, int64, int32, int16, int8, uint8 or bool.");
    }

    tutti_operation operation() const {
        tutti_operation operation{};
        operation.kind = kind->code;
        operation.dtype = dtype;
        operation.reduce = reduce;
        operation.root = root;
        operation.peer = peer;
        operation.tag = tag;
        operation.in_parts = in.size();
        operation.out_parts = out.size();
        operation.in = in.data();
        operation.in_bytes = in_bytes.data();
        operation.out = out.data();
        operation.out_bytes = out_bytes.data();
        operation.where = where.empty() ? nullptr : where.c_str();
        return operation;
    }

    void copy_back() {
        if (C10_LIKELY(copies.empty())) return;
        at::AutoDispatchBelowADInplaceOrView raw;  // results of a collective have no gradient
        for (auto& [original, copy] : copies) original.copy_(copy);
    }

    std::vector<at::Tensor> results() const { return {outputs.begin(), outputs.end()}; }

    static int64_t elements(const c10::SmallVector<at::Tensor, 1>& tensors) {
        int64_t sum = 0;
        for (auto& tensor : tensors) sum += tensor.numel();
        return sum;
    }

   private:
    void check(const at::Tensor& tensor) {
        TORCH_CHECK_VALUE(tensor.device().is_cpu(), "shm ", kind->name,
                    " takes CPU tensors, but this tensor is on ", tensor.device(),
                    ". Create the group with backend=\"cpu:shm,cuda:nccl\".");
        TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "shm ", kind->name,
                    " takes dense tensors, but this tensor is ", tensor.layout(), ". Use .to_dense().");
        bool first = inputs.empty() && outputs.empty();
        TORCH_CHECK_TYPE(first || tensor.scalar_type() == scalar, "shm ", kind->name,
                         ": all tensors of a call must have the same dtype, got ",
                         c10::toString(scalar), " and ", c10::toString(tensor.scalar_type()));
        if (first) {
            scalar = tensor.scalar_type();
            dtype = dtype_code(scalar);
        }
    }

    static at::Tensor copy_of(const at::Tensor& tensor) {
        at::AutoDispatchBelowADInplaceOrView raw;
        return tensor.contiguous();
    }

    const at::Tensor& input(const at::Tensor& tensor) {
        check(tensor);
        inputs.push_back(tensor);
        if (C10_LIKELY(tensor.is_contiguous())) return inputs.back();
        kept.push_back(copy_of(tensor));
        return kept.back();
    }

    const at::Tensor& output(const at::Tensor& tensor) {
        check(tensor);
        outputs.push_back(tensor);
        if (C10_LIKELY(tensor.is_contiguous())) return outputs.back();
        copies.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options()));
        return copies.back().second;
    }

    void add_in(const void* memory, uint64_t bytes) {
        in.push_back(const_cast<void*>(memory));
        in_bytes.push_back(bytes);
    }

    void add_out(void* memory, uint64_t bytes) {
        out.push_back(memory);
        out_bytes.push_back(bytes);
    }

    c10::SmallVector<uint64_t, 4> split(const at::Tensor& whole, int size,
                                      const std::vector<int64_t>& rows, const char* which) const {
        uint64_t bytes = whole.nbytes();
        if (rows.empty()) {
            TORCH_CHECK_VALUE(whole.numel() % size == 0, "shm ", kind->name, ": the ", which, " of ",
                        whole.numel(), " elements cannot be split into ", size, " equal parts");
            return c10::SmallVector<uint64_t, 4>(size, bytes / size);
        }
        TORCH_CHECK_VALUE(static_cast<int>(rows.size()) == size, "shm ", kind->name, ": expected ",
                    size, " ", which, " split sizes (one for each rank), got ", rows.size());
        int64_t all = 0;
        for (int64_t count : rows) {
            TORCH_CHECK_VALUE(count >= 0, "shm ", kind->name, ": ", which,
                              " split sizes must not be negative, got ", count);
            all += count;
        }
        int64_t height = whole.dim() ? whole.size(0) : 1;
        TORCH_CHECK_VALUE(all == height, "shm ", kind->name, ": ", which, " split sizes sum to ", all,
                    ", but the tensor has ", height, " rows");
        c10::SmallVector<uint64_t, 4> parts;
        for (int64_t count : rows) parts.push_back(height ? bytes / height * count : 0);
        return parts;
    }
};

}  // namespace tutti
