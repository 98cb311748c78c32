// One operation, from torch's tensors to the parts that the core moves.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "core.h"

namespace tutti {

// What differs between the kinds of operation only by name.
struct Kind {
    uint32_t code;
    c10d::OpType type;
    const char* name;   // as the profiler and our errors say it
    const char* title;  // as the trace shows it
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
    // What the caller gave, for the profiler and for result().
    c10::SmallVector<at::Tensor, 1> inputs, outputs;
    // Dense copies that stand in for the caller's tensors, to be copied back when done.
    c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 1> stand_ins;
    c10::SmallVector<at::Tensor, 1> kept;
    c10::SmallVector<void*, 4> in, out;
    c10::SmallVector<uint64_t, 4> in_bytes, out_bytes;
    std::string where;

    void reads(const at::Tensor& tensor) {
        const at::Tensor& dense = readable(tensor);
        add_in(dense.const_data_ptr(), dense.nbytes());
    }

    void writes(const at::Tensor& tensor) {
        const at::Tensor& dense = writable(tensor);
        add_out(dense.mutable_data_ptr(), dense.nbytes());
    }

    // In place: the same memory is read and written.
    void updates(const at::Tensor& tensor) {
        check(tensor);
        inputs.push_back(tensor);
        outputs.push_back(tensor);
        const at::Tensor* dense = &tensor;
        if (C10_UNLIKELY(!tensor.is_contiguous())) {
            stand_ins.emplace_back(tensor, copy_of(tensor));
            dense = &stand_ins.back().second;
        }
        void* memory = dense->mutable_data_ptr();
        add_in(memory, dense->nbytes());
        add_out(memory, dense->nbytes());
    }

    // One dense tensor as a part per rank, cut along its first dimension: evenly, or as `rows` say.
    void reads_cut(const at::Tensor& whole, int size, const std::vector<int64_t>& rows = {}) {
        const at::Tensor& dense = readable(whole);
        auto* memory = static_cast<const char*>(dense.const_data_ptr());
        for (uint64_t bytes : cut(whole, size, rows, "input")) {
            add_in(memory, bytes);
            memory += bytes;
        }
    }

    void writes_cut(const at::Tensor& whole, int size, const std::vector<int64_t>& rows = {}) {
        const at::Tensor& dense = writable(whole);
        auto* memory = static_cast<char*>(dense.mutable_data_ptr());
        for (uint64_t bytes : cut(whole, size, rows, "output")) {
            add_out(memory, bytes);
            memory += bytes;
        }
    }

    void reduces(const c10d::ReduceOp& op) {
        TORCH_CHECK_VALUE(op.op_ <= c10d::ReduceOp::BXOR, "shm ", kind->name,
                    " knows SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR; PREMUL_SUM is NCCL's: "
                    "multiply the tensor, then use SUM");
        reduce = static_cast<uint32_t>(op.op_);  // torch's order is the core's
        if (scalar == at::kComplexFloat || scalar == at::kComplexDouble) {
            TORCH_CHECK_VALUE(reduce == TUTTI_SUM || reduce == TUTTI_AVG, "shm ", kind->name,
                        ": complex numbers can be summed or averaged only");
            dtype = scalar == at::kComplexFloat ? TUTTI_F32 : TUTTI_F64;
        }
        TORCH_CHECK_VALUE(reduce != TUTTI_AVG || dtype <= TUTTI_BF16 || dtype == TUTTI_BYTES, "shm ", kind->name, ": AVG of ",
                    c10::toString(scalar), " would cut fractions off: use SUM");
        TORCH_CHECK_TYPE(dtype != TUTTI_BYTES, "shm ", kind->name, " cannot reduce ",
                         c10::toString(scalar), ": reduce it as float32 or another of float64, "
                         "float16, bfloat16, int64, int32, int16, int8, uint8, bool");
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
        if (C10_LIKELY(stand_ins.empty())) return;
        at::AutoDispatchBelowADInplaceOrView raw;  // the results of a collective have no gradient
        for (auto& [theirs, ours] : stand_ins) theirs.copy_(ours);
    }

    std::vector<at::Tensor> results() const { return {outputs.begin(), outputs.end()}; }

    static int64_t elements(const c10::SmallVector<at::Tensor, 1>& tensors) {
        int64_t sum = 0;
        for (auto& tensor : tensors) sum += tensor.numel();
        return sum;
    }

   private:
    void check(const at::Tensor& tensor) {
        TORCH_CHECK_VALUE(tensor.device().is_cpu(), "shm ", kind->name, " moves CPU tensors, this one is on ",
                    tensor.device(), ": start the group with backend=\"cpu:shm,cuda:nccl\"");
        TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "shm ", kind->name,
                    " moves dense tensors, this one is ", tensor.layout(), ": use .to_dense()");
        bool first = inputs.empty() && outputs.empty();
        TORCH_CHECK_TYPE(first || tensor.scalar_type() == scalar, "shm ", kind->name, ": a ",
                         c10::toString(scalar), " and a ", c10::toString(tensor.scalar_type()),
                         " tensor in one call");
        if (first) {
            scalar = tensor.scalar_type();
            dtype = dtype_code(scalar);
        }
    }

    static at::Tensor copy_of(const at::Tensor& tensor) {
        at::AutoDispatchBelowADInplaceOrView raw;
        return tensor.contiguous();
    }

    const at::Tensor& readable(const at::Tensor& tensor) {
        check(tensor);
        inputs.push_back(tensor);
        if (C10_LIKELY(tensor.is_contiguous())) return inputs.back();
        kept.push_back(copy_of(tensor));
        return kept.back();
    }

    const at::Tensor& writable(const at::Tensor& tensor) {
        check(tensor);
        outputs.push_back(tensor);
        if (C10_LIKELY(tensor.is_contiguous())) return outputs.back();
        stand_ins.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options()));
        return stand_ins.back().second;
    }

    void add_in(const void* memory, uint64_t bytes) {
        in.push_back(const_cast<void*>(memory));
        in_bytes.push_back(bytes);
    }

    void add_out(void* memory, uint64_t bytes) {
        out.push_back(memory);
        out_bytes.push_back(bytes);
    }

    c10::SmallVector<uint64_t, 4> cut(const at::Tensor& whole, int size,
                                      const std::vector<int64_t>& rows, const char* which) const {
        uint64_t bytes = whole.nbytes();
        if (rows.empty()) {
            TORCH_CHECK_VALUE(whole.numel() % size == 0, "shm ", kind->name, ": ", which, " of ",
                        whole.numel(), " elements cannot be cut into ", size, " equal parts");
            return c10::SmallVector<uint64_t, 4>(size, bytes / size);
        }
        TORCH_CHECK_VALUE(static_cast<int>(rows.size()) == size, "shm ", kind->name, ": ", rows.size(), " ",
                    which, " split sizes for ", size, " ranks");
        int64_t all = 0;
        for (int64_t count : rows) {
            TORCH_CHECK_VALUE(count >= 0, "shm ", kind->name, ": ", which, " split size ", count);
            all += count;
        }
        int64_t height = whole.dim() ? whole.size(0) : 1;
        TORCH_CHECK_VALUE(all == height, "shm ", kind->name, ": ", which, " split sizes sum to ", all,
                    ", the tensor has ", height, " rows");
        c10::SmallVector<uint64_t, 4> parts;
        for (int64_t count : rows) parts.push_back(height ? bytes / height * count : 0);
        return parts;
    }
};

}  // namespace tutti
