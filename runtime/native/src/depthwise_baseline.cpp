#define ODTPACK_LOOPS kDepthwise_baseline
#define ODTPACK_WIDTH 4
#include "depthwise_execute.inc"
