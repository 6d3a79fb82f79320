// All that TensorRT's headers take of CUDA's runtime, which the library does not use: NVRTC's package does not have the rest of its headers.
#pragma once
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
