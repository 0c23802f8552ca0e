#define ODTPACK_LOOPS kProduct_avx512
#define ODTPACK_WIDTH 16
#include "product_execute.inc"
