// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite put` and `kite get`: copies files to regions and regions to files.

use std::ffi::OsString;
use std::fs::{File, Metadata, Permissions};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{fchown, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use anyhow::{bail, ensure, Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use kite::{AllocOptions, Cluster, Region, Rights};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::args::RegionArgs;
use crate::regions;

/// Size of a copy request in bytes: large enough to hide the cost of a request, small enough to pin.
const BLOCK_BYTES: u64 = 4 << 20;

/// Source or destination of a copy: a region, or memory in tests.
trait BlockStore {
    fn len(&self) -> u64;
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()>;
    fn write(&self, data: &[u8], offset: u64) -> Result<()>;
}

impl BlockStore for Region {
    fn len(&self) -> u64 {
        Region::len(self)
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.read_at(buffer, offset)
            .with_context(|| format!("reading at {offset}"))
    }

    fn write(&self, data: &[u8], offset: u64) -> Result<()> {
        self.write_at(data, offset)
            .with_context(|| format!("writing at {offset}"))
    }
}

/// Copies a file to a new region. Frees the region if the copy fails or a signal interrupts it.
pub(crate) fn put(
    cluster: &Cluster,
    path: &Path,
    name: &str,
    options: impl FnOnce(u64) -> AllocOptions,
) -> Result<()> {
    let (mut file, len) = open_source(path)?;
    let shown = path.display();
    ensure!(len > 0, "{shown} is empty; a region has at least 1 byte");
    let stop = register_stop_flag()?;
    let region = cluster.alloc(&options(len).name(name));
    let region = region.with_context(|| format!("allocating {name}"))?;
    let result = upload(&mut file, &region, &stop);
    let result = result.with_context(|| format!("copying {shown} to {name}"));
    if result.is_err() {
        // The first error is reported.
        let _ = region.free();
    }
    result
}

/// Opens the source of a region. Returns the file and its length in bytes.
fn open_source(path: &Path) -> Result<(File, u64)> {
    if is_stdio(path) {
        return spool(&mut io::stdin().lock());
    }
    let shown = path.display();
    let file = File::open(path).with_context(|| format!("cannot open {shown}"))?;
    let meta = file
        .metadata()
        .with_context(|| format!("cannot inspect {shown}"))?;
    ensure!(
        meta.is_file(),
        "{shown} is not a regular file, so its length is unknown; use - to read a pipe"
    );
    Ok((file, meta.len()))
}

/// Returns `true` if `path` denotes standard input or output.
fn is_stdio(path: &Path) -> bool {
    path == Path::new("-")
}

/// Copies a stream to an unlinked temporary file, since a region has a fixed size and the length of a stream is
/// unknown before its end. Returns the file and its length in bytes.
fn spool(stream: &mut impl Read) -> Result<(File, u64)> {
    let directory = std::env::temp_dir();
    let mut file = tempfile::tempfile_in(&directory)
        .with_context(|| format!("creating a temporary file in {}", directory.display()))?;
    let len = io::copy(stream, &mut file).with_context(|| {
        let directory = directory.display();
        format!("copying standard input to a temporary file in {directory} (set by TMPDIR)")
    })?;
    file.rewind()?;
    Ok((file, len))
}

/// Returns a flag that SIGINT and SIGTERM set.
fn register_stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, Arc::clone(&stop)).context("handling signals")?;
    }
    Ok(stop)
}

/// Copies a region to a file, which appears when the copy is complete. An interrupted copy leaves no file.
pub(crate) fn get(cluster: &Cluster, selected: &RegionArgs, path: &Path) -> Result<()> {
    let name = &selected.name;
    let region = regions::open(cluster, selected, Rights::READ)
        .with_context(|| format!("opening {name}"))?;
    if is_stdio(path) {
        let result = copy_to_fd(&region, io::stdout().as_fd());
        return result.with_context(|| format!("copying {name} to standard output"));
    }
    copy_to_path(&region, path).with_context(|| format!("copying {name} to {}", path.display()))
}

/// Copies a region to a descriptor, without a progress bar. A reader that closes its pipe early, such as
/// `head`, is not an error.
fn copy_to_fd(region: &impl BlockStore, output: BorrowedFd<'_>) -> Result<()> {
    let mut file = File::from(output.try_clone_to_owned()?);
    let result = download(
        region,
        &mut file,
        &AtomicBool::new(false),
        &ProgressBar::hidden(),
    );
    match result {
        Err(error) if is_broken_pipe(&error) => Ok(()),
        other => other,
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

fn copy_to_path(region: &Region, path: &Path) -> Result<()> {
    let path = match std::fs::metadata(path) {
        // A device or pipe is written in place. An interrupted copy leaves no file to remove.
        Ok(meta) if !meta.is_file() => {
            let mut file = File::options().write(true).open(path)?;
            let stop = AtomicBool::new(false);
            return download(region, &mut file, &stop, &progress(region.len()));
        }
        // A symbolic link, such as /dev/stdout, is kept and its target is replaced.
        Ok(_) => path.canonicalize()?,
        Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
        Err(error) => return Err(error.into()),
    };
    let stop = register_stop_flag()?;
    let bar = progress(region.len());
    replace_file(&path, |file| download(region, file, &stop, &bar))
}

/// Writes a new file beside `path` and renames it to `path`. The new file is not readable by users that could not read
/// the old one.
fn replace_file(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let mut partial = OsString::from(path);
    partial.push(format!(".{}.partial", std::process::id()));
    let partial = PathBuf::from(partial);
    let previous = std::fs::metadata(path).ok();
    let mut options = File::options();
    options.write(true).create_new(true);
    if previous.is_some() {
        options.mode(0o600);
    }
    let mut file = options.open(&partial)?;
    let written = previous
        .map_or(Ok(()), |previous| copy_mode_and_owner(&file, &previous))
        .map_err(Into::into)
        .and_then(|()| write(&mut file))
        .and_then(|()| Ok(std::fs::rename(&partial, path)?));
    if written.is_err() {
        // The first error is reported.
        let _ = std::fs::remove_file(&partial);
    }
    written
}

/// Copies the mode of a file, and owner and group if permitted. If the group differs, the group gets no rights.
fn copy_mode_and_owner(file: &File, previous: &Metadata) -> io::Result<()> {
    let (owner, group) = (Some(previous.uid()), Some(previous.gid()));
    let _ = fchown(file, owner, group).or_else(|_| fchown(file, None, group));
    let same_group = file.metadata()?.gid() == previous.gid();
    let mode_mask = if same_group { 0o777 } else { 0o707 };
    file.set_permissions(Permissions::from_mode(previous.mode() & mode_mask))
}

fn upload(file: &mut impl Read, region: &impl BlockStore, stop: &AtomicBool) -> Result<()> {
    for_each_block(region.len(), &progress(region.len()), |offset, block| {
        check_stop(stop)?;
        file.read_exact(block).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => anyhow::anyhow!("the file became shorter during the copy"),
            _ => error.into(),
        })?;
        region.write(block, offset)
    })?;
    if file.read(&mut [0])? != 0 {
        bail!("the file became longer during the copy");
    }
    Ok(())
}

fn download(
    region: &impl BlockStore,
    file: &mut impl Write,
    stop: &AtomicBool,
    bar: &ProgressBar,
) -> Result<()> {
    for_each_block(region.len(), bar, |offset, block| {
        check_stop(stop)?;
        region.read(block, offset)?;
        Ok(file.write_all(block)?)
    })?;
    Ok(file.flush()?)
}

/// Fails if the stop flag is set.
fn check_stop(stop: &AtomicBool) -> Result<()> {
    ensure!(!stop.load(Ordering::Relaxed), "interrupted by a signal");
    Ok(())
}

/// Calls `copy` for each block of `len` bytes, with its offset and a buffer of its length.
fn for_each_block(
    len: u64,
    progress: &ProgressBar,
    mut copy: impl FnMut(u64, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let mut buffer = vec![0; usize::try_from(len.min(BLOCK_BYTES))?];
    let mut offset = 0;
    while offset < len {
        let size = usize::try_from((len - offset).min(BLOCK_BYTES))?;
        copy(offset, &mut buffer[..size])?;
        offset += size as u64;
        progress.set_position(offset);
    }
    progress.finish_and_clear();
    Ok(())
}

/// Returns a progress bar on standard error, which is visible if that is a terminal.
fn progress(len: u64) -> ProgressBar {
    let template = "{wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
    let bar = ProgressBar::new(len);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::os::unix::net::UnixStream;

    struct TestRegion(RefCell<Vec<u8>>);

    impl BlockStore for TestRegion {
        fn len(&self) -> u64 {
            self.0.borrow().len() as u64
        }

        fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
            let at = offset as usize;
            buffer.copy_from_slice(&self.0.borrow()[at..at + buffer.len()]);
            Ok(())
        }

        fn write(&self, data: &[u8], offset: u64) -> Result<()> {
            let at = offset as usize;
            self.0.borrow_mut()[at..at + data.len()].copy_from_slice(data);
            Ok(())
        }
    }

    fn test_region(len: usize) -> TestRegion {
        TestRegion(RefCell::new(vec![0; len]))
    }

    #[test]
    fn file_uploaded_and_downloaded_is_unchanged() {
        let block = BLOCK_BYTES as usize;
        for len in [1, block - 1, block, block + 1, 2 * block + 7] {
            let file: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let region = test_region(len);
            upload(&mut &file[..], &region, &AtomicBool::new(false)).unwrap();
            let mut back = Vec::new();
            download(
                &region,
                &mut back,
                &AtomicBool::new(false),
                &ProgressBar::hidden(),
            )
            .unwrap();
            assert!(back == file, "{len}");
        }
    }

    #[test]
    fn spooled_stream_is_read_from_its_start() {
        let (mut reader, mut writer) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || writer.write_all(&[7; 100_000]).unwrap());
        let (mut file, len) = spool(&mut reader).unwrap();
        thread.join().unwrap();
        let mut read = Vec::new();
        file.read_to_end(&mut read).unwrap();
        assert_eq!(len, 100_000);
        assert!(read == [7; 100_000]);
    }

    #[test]
    fn copy_to_closed_pipe_succeeds() {
        let (reader, writer) = UnixStream::pair().unwrap();
        drop(reader);
        copy_to_fd(&test_region(3 * BLOCK_BYTES as usize), writer.as_fd()).unwrap();
    }

    #[test]
    fn copy_to_full_device_fails() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        copy_to_fd(&test_region(1), full.as_fd()).unwrap_err();
    }

    #[test]
    fn upload_of_file_with_changed_length_fails() {
        let error = |len: usize| {
            upload(
                &mut &[1; 10][..],
                &test_region(len),
                &AtomicBool::new(false),
            )
            .unwrap_err()
            .to_string()
        };
        assert!(error(11).contains("shorter"));
        assert!(error(9).contains("longer"));
    }

    #[test]
    fn copy_with_stop_flag_set_writes_nothing() {
        let region = test_region(1);
        upload(&mut &[1][..], &region, &AtomicBool::new(true)).unwrap_err();
        assert_eq!(region.0.borrow()[..], [0]);
        let mut file = Vec::new();
        let stop = AtomicBool::new(true);
        download(&region, &mut file, &stop, &ProgressBar::hidden()).unwrap_err();
        assert!(file.is_empty());
    }

    /// Creates an empty directory.
    fn directory(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("kite-copy-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn replaced_file_keeps_its_mode() {
        let dir = directory("mode");
        let path = dir.join("file");
        replace_file(&path, |file| Ok(file.write_all(b"old")?)).unwrap();
        for mode in [0o600, 0o640, 0o666, 0o400] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            replace_file(&path, |file| {
                let partial = file.metadata()?.mode() & 0o777;
                ensure!(partial == mode, "{partial:o} while it is written");
                Ok(file.write_all(b"new")?)
            })
            .unwrap();
            let meta = std::fs::metadata(&path).unwrap();
            assert_eq!(meta.mode() & 0o777, mode, "{:o}", meta.mode());
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn failed_replace_leaves_the_old_file_only() {
        let dir = directory("failed");
        let path = dir.join("file");
        replace_file(&path, |file| Ok(file.write_all(b"old")?)).unwrap();
        replace_file(&path, |_| bail!("no")).unwrap_err();
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
