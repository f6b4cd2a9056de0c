# SPDX-License-Identifier: Apache-2.0
#
# Fails unless DOCUMENT holds what PROGRAM prints.

execute_process(COMMAND ${PROGRAM} OUTPUT_VARIABLE output RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${PROGRAM} failed: ${status}")
endif()
file(READ ${DOCUMENT} document)
string(FIND "${document}" "${output}" place)
if(place EQUAL -1)
  message(FATAL_ERROR "${DOCUMENT} does not hold what ${PROGRAM} prints. Paste this into it:\n${output}")
endif()
