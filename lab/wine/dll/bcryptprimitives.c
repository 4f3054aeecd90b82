// A bcryptprimitives.dll, which Wine 8 has not got, and which every program of Go loads as it starts: Go's random numbers
// come from there. The DLL also corrects an answer of Wine 8, without which os.RemoveAll fails.
#include <windows.h>
#include <winternl.h>

BOOLEAN NTAPI SystemFunction036(PVOID, ULONG); // RtlGenRandom

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE p, SIZE_T n) {
  for (ULONG k; n > 0; p += k, n -= k) {
    k = n > 0x10000000 ? 0x10000000 : (ULONG)n;
    if (!SystemFunction036(p, k)) return FALSE;
  }
  return TRUE;
}

typedef NTSTATUS(NTAPI *set_information)(HANDLE, IO_STATUS_BLOCK *, PVOID, ULONG, ULONG);
static set_information original;

// Go deletes files by FileDispositionInformationEx, or as before Windows 10 where that is an invalid class. Wine 8 says
// that it is not implemented, which Go does not expect.
static NTSTATUS NTAPI set_information_file(HANDLE file, IO_STATUS_BLOCK *io, PVOID data, ULONG length, ULONG class) {
  NTSTATUS status = original(file, io, data, length, class);
  return status == (NTSTATUS)0xc0000002 ? (NTSTATUS)0xc0000003 : status;
}

// replace changes what GetProcAddress finds: the export table has offsets from the library, 32 bits without a sign, so
// that this DLL must be above it (see the address in lab/wine/build).
static void *replace(BYTE *library, const char *name, void *by) {
  IMAGE_NT_HEADERS *headers = (IMAGE_NT_HEADERS *)(library + ((IMAGE_DOS_HEADER *)library)->e_lfanew);
  IMAGE_EXPORT_DIRECTORY *exports =
      (IMAGE_EXPORT_DIRECTORY *)(library + headers->OptionalHeader.DataDirectory[0].VirtualAddress);
  DWORD *names = (DWORD *)(library + exports->AddressOfNames), *functions = (DWORD *)(library + exports->AddressOfFunctions);
  WORD *ordinals = (WORD *)(library + exports->AddressOfNameOrdinals);
  SIZE_T offset = (BYTE *)by - library;

  for (DWORD i = 0, old; i < exports->NumberOfNames; i++) {
    DWORD *function = functions + ordinals[i];
    if (strcmp((char *)library + names[i], name)) continue;
    if ((DWORD)offset != offset || !VirtualProtect(function, sizeof *function, PAGE_READWRITE, &old)) return 0;
    void *before = library + *function;
    *function = (DWORD)offset;
    VirtualProtect(function, sizeof *function, old, &old);
    return before;
  }
  return 0;
}

BOOL WINAPI DllMain(HINSTANCE h, DWORD reason, LPVOID reserved) {
  (void)h; (void)reserved;
  if (reason != DLL_PROCESS_ATTACH) return TRUE;
  BYTE *ntdll = (BYTE *)GetModuleHandleA("ntdll.dll");
  original = (set_information)(void *)GetProcAddress((HMODULE)ntdll, "NtSetInformationFile");
  return replace(ntdll, "NtSetInformationFile", set_information_file) != 0;
}
