// Recurrent cells. (cells.cpp)
#pragma once

namespace torch {
class Library;
}

namespace marid {

// Have PyTorch's operators for cells take the CPU's steps.
void register_cells(torch::Library& library);

}  // namespace marid
