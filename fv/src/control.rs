//! The control socket: a UNIX stream socket on which `wg` and others speak UAPI (`uapi`) to a running tunnel.
//!
//! One thread accepts, one thread serves each connection; what they want done is done by the worker, one
//! thing after the other. Called by `run`.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forestvpn_quantum::config::{DeviceSnapshot, DeviceUpdate};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::sys::stat::{Mode, umask};
use zeroize::Zeroizing;

use crate::uapi::{MAX_LINE, SetParser, get_answer};

/// Where `wg` looks for sockets.
pub(crate) const DIRECTORY: &str = "/var/run/wireguard";

/// Connections served at once; one more ends the oldest.
const MAX_CONNECTIONS: usize = 16;
/// A connection on which nothing comes or goes for so long is closed.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is looked whether the socket file is still there.
const LOOK: Duration = Duration::from_secs(1);

/// What a control socket controls.
pub(crate) trait Control: Send + Sync + 'static {
    /// Applies the whole change, or nothing of it.
    ///
    /// # Errors
    /// When it cannot be applied.
    fn configure(&self, update: DeviceUpdate) -> Result<(), Refusal>;

    /// How things are now.
    ///
    /// # Errors
    /// When the tunnel is gone.
    fn snapshot(&self) -> Result<DeviceSnapshot, Refusal>;

    /// What is in use and what was counted, as lines of `key=value` (`doctor::report`).
    ///
    /// # Errors
    /// When the tunnel is gone.
    fn report(&self) -> Result<String, Refusal>;
}

/// Why something was not done: a number for the client, words for the log.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) errno: Errno,
    pub(crate) text: String,
}

/// The socket's file for an interface.
pub(crate) fn path_in(directory: &Path, ifname: &str) -> PathBuf {
    directory.join(format!("{ifname}.sock"))
}

/// Name of a network interface to its index, as UAPI's scoped endpoints need it.
pub(crate) fn scope(name: &str) -> Option<u32> {
    nix::net::if_::if_nametoindex(name).ok()
}

/// A listening control socket that nobody serves yet; its file goes when it is dropped.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    listener: UnixListener,
    file: Option<SocketFile>,
}

/// The file of a socket, known again by its inode.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    fn at(path: &Path) -> io::Result<Self> {
        let meta = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), identity: (meta.dev(), meta.ino()) })
    }

    fn is_there(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok_and(|meta| (meta.dev(), meta.ino()) == self.identity)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// How often a socket's place is tried when other processes remove and make files there meanwhile.
const TRIES: usize = 8;

impl ControlSocket {
    /// Makes the socket for `ifname` in `directory`, readable and writable by its owner only. A file that a
    /// killed process left behind is replaced; the socket of a living one is not.
    ///
    /// # Errors
    /// One sentence that says what to do.
    pub(crate) fn open(directory: &Path, ifname: &str) -> Result<Self, String> {
        let path = path_in(directory, ifname);
        let failed =
            |e: &dyn std::fmt::Display| format!("cannot make the control socket {}: {e}", path.display());
        fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(|e| failed(&e))?;
        // `wg show` in another process may remove a stale file at any moment between these steps: then again.
        let listener = (0..TRIES).find_map(|_| match bind(&path) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => match fs::symlink_metadata(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => None,
                Ok(meta) if meta.file_type().is_socket() => {
                    if is_served(&path) {
                        return Some(Err(failed(&format!("another process serves {ifname} already"))));
                    }
                    match fs::remove_file(&path) {
                        Err(e) if e.kind() != io::ErrorKind::NotFound => Some(Err(failed(&e))),
                        _ => None,
                    }
                }
                _ => Some(Err(failed(&"something that is no socket is in its place; remove it"))),
            },
            other => Some(other.map_err(|e| failed(&e))),
        });
        let listener =
            listener.ok_or_else(|| failed(&"it is taken again and again by other processes"))??;
        let file = SocketFile::at(&path).map_err(|e| failed(&e))?;
        Ok(Self { listener, file: Some(file) })
    }

    /// Takes over a listening socket that another program made.
    pub(crate) fn inherited(listener: UnixListener) -> Self {
        let address = listener.local_addr().ok();
        let path =
            address.as_ref().and_then(|address| address.as_pathname()).filter(|path| path.is_absolute());
        let file = path.and_then(|path| SocketFile::at(path).ok());
        Self { listener, file }
    }

    /// Serves requests until the result is dropped. `removed` is called once when the socket's file
    /// disappears.
    ///
    /// # Errors
    /// When threads or pipes cannot be had.
    pub(crate) fn serve(
        self,
        control: Arc<impl Control>,
        removed: impl FnOnce() + Send + 'static,
    ) -> io::Result<ControlServer> {
        self.listener.set_nonblocking(true)?;
        let (stop, stopped) = UnixStream::pair()?;
        let connections = Arc::default();
        let acceptor = Acceptor { listener: self.listener, stopped, connections: Arc::clone(&connections) };
        let file = self.file.map(Arc::new);
        let watched = file.clone();
        let thread = thread::Builder::new()
            .name("control".into())
            .spawn(move || acceptor.run(&control, watched.as_deref(), removed))?;
        Ok(ControlServer { connections, stop, thread: Some(thread), file })
    }
}

/// A listening socket at `path`, where nothing may be yet. It is made beside and put there when it listens
/// already: `wg show` removes a socket that refuses it, be it stale or only a moment too young.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let beside = path.with_file_name(format!(".{name}.{}", std::process::id()));
    // Of a process with the same number that was killed in this very moment.
    let _ = fs::remove_file(&beside);
    let listener = bind_private(&beside)?;
    let put = fs::hard_link(&beside, path);
    fs::remove_file(&beside)?;
    match put {
        Ok(()) => Ok(listener),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(io::ErrorKind::AddrInUse.into()),
        // A file system without hard links.
        Err(_) => bind_private(path),
    }
}

/// Owner only, from the first moment on.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let before = umask(Mode::from_bits_truncate(0o077));
    let listener = UnixListener::bind(path);
    umask(before);
    listener
}

/// Whether someone listens. Does not wait: a queue that is full belongs to someone, too.
fn is_served(path: &Path) -> bool {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let tried = socket(AddressFamily::Unix, SockType::Stream, flags, None)
        .and_then(|fd| connect(fd.as_raw_fd(), &UnixAddr::new(path)?));
    !matches!(tried, Err(Errno::ECONNREFUSED | Errno::ENOENT))
}

type Connections = Arc<Mutex<VecDeque<Arc<UnixStream>>>>;

/// Serves the socket in threads of its own. Dropping it removes the socket's file and ends them.
#[derive(Debug)]
pub(crate) struct ControlServer {
    connections: Connections,
    stop: UnixStream,
    thread: Option<JoinHandle<()>>,
    file: Option<Arc<SocketFile>>,
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        let _ = self.stop.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // The last owner of the file: nobody can connect any more.
        self.file = None;
        for stream in self.connections.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

struct Acceptor {
    listener: UnixListener,
    stopped: UnixStream,
    connections: Connections,
}

impl Acceptor {
    fn run(&self, control: &Arc<impl Control>, file: Option<&SocketFile>, removed: impl FnOnce()) {
        let mut removed = Some(removed);
        loop {
            let mut fds =
                [self.listener.as_fd(), self.stopped.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            let timeout = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::MAX);
            let polled = poll(&mut fds, timeout);
            let [listening, stopped] = fds.map(|fd| fd.any() == Some(true));
            if stopped {
                return;
            }
            if file.is_some_and(|file| !file.is_there())
                && let Some(removed) = removed.take()
            {
                removed();
            }
            match polled {
                Ok(_) if listening => self.accept(control),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(e) => {
                    log::error!("the control socket fails: {e}");
                    thread::sleep(LOOK);
                }
            }
        }
    }

    fn accept(&self, control: &Arc<impl Control>) {
        match self.listener.accept() {
            Ok((stream, _)) => {
                if let Err(e) = self.start(stream, control) {
                    log::error!("a connection to the control socket is not served: {e}");
                }
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(e) => {
                // Out of file descriptors, most likely; the connection waits until there are some.
                log::error!("the control socket cannot accept: {e}");
                thread::sleep(LOOK);
            }
        }
    }

    fn start(&self, stream: UnixStream, control: &Arc<impl Control>) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let stream = Arc::new(stream);
        let mut all = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_CONNECTIONS
            && let Some(oldest) = all.pop_front()
        {
            let _ = oldest.shutdown(std::net::Shutdown::Both);
        }
        let (mine, control, connections) =
            (Arc::clone(&stream), Arc::clone(control), Arc::clone(&self.connections));
        thread::Builder::new().name("control-client".into()).spawn(move || {
            // A client that goes away or stays silent is nothing to report.
            let _ = talk(&mine, &*control);
            let mut all = connections.lock().unwrap_or_else(PoisonError::into_inner);
            all.retain(|other| !Arc::ptr_eq(other, &mine));
        })?;
        all.push_back(stream);
        Ok(())
    }
}

/// Serves the requests of one connection, one after the other, until it ends.
fn talk(stream: &UnixStream, control: &impl Control) -> io::Result<()> {
    let mut lines = Lines::new(stream);
    loop {
        match lines.next() {
            Ok(Line::Text(b"get=1")) => {
                tell(&mut lines, stream, "get=1", || Ok(get_answer(&control.snapshot()?)))?;
            }
            // Only `fv doctor` asks this; `wg` does not know it.
            Ok(Line::Text(b"fv=1")) => {
                let report = || control.report().map(|lines| (lines + "errno=0\n\n").into());
                tell(&mut lines, stream, "fv=1", report)?;
            }
            Ok(Line::Text(b"set=1")) => {
                let errno = set(&mut lines, control);
                answer(stream, errno.map_or(0, |errno| (errno as i32).saturating_neg()))?;
            }
            Ok(Line::Text(b"")) => {}
            Ok(Line::Text(_) | Line::TooLong) => {
                log::error!("a request on the control socket begins with neither get=1 nor set=1");
                return answer(stream, (Errno::EINVAL as i32).saturating_neg());
            }
            Ok(Line::End) | Err(_) => return Ok(()),
        }
    }
}

/// `wg` takes the errno of a get as it is, and that of a set with a minus in front.
fn answer(mut stream: &UnixStream, errno: i32) -> io::Result<()> {
    stream.write_all(format!("errno={errno}\n\n").as_bytes())
}

/// Answers a request of one line.
fn tell(
    lines: &mut Lines<'_>,
    mut stream: &UnixStream,
    request: &str,
    text: impl FnOnce() -> Result<Zeroizing<String>, Refusal>,
) -> io::Result<()> {
    match lines.next()? {
        Line::Text(b"") => {}
        Line::End => return Ok(()),
        Line::Text(_) | Line::TooLong => {
            while !matches!(lines.next()?, Line::Text(b"") | Line::End) {}
            log::error!("a request on the control socket has more lines than {request}");
            return answer(stream, Errno::EINVAL as i32);
        }
    }
    match text() {
        Ok(text) => stream.write_all(text.as_bytes()),
        Err(refusal) => {
            log::error!("{request} on the control socket failed: {}", refusal.text);
            answer(stream, refusal.errno as i32)
        }
    }
}

fn set(lines: &mut Lines<'_>, control: &impl Control) -> Option<Errno> {
    let mut parser = SetParser::new(&scope);
    loop {
        match lines.next() {
            Ok(Line::Text(b"")) => break,
            Ok(Line::Text(line)) => parser.line(line),
            Ok(Line::TooLong) => parser.long_line(),
            Ok(Line::End) | Err(_) => {
                parser.cut_short();
                break;
            }
        }
    }
    let refusal = match parser.finish() {
        Ok(update) => control.configure(update).err()?,
        Err(e) => Refusal { errno: e.errno, text: e.to_string() },
    };
    log::error!("a set on the control socket changed nothing: {}", refusal.text);
    Some(refusal.errno)
}

enum Line<'a> {
    /// Without its newline.
    Text(&'a [u8]),
    /// Longer than MAX_LINE; thrown away.
    TooLong,
    /// The client has nothing more to say. What came after the last newline is dropped.
    End,
}

/// Lines from a stream, in a buffer of fixed size that is wiped at the end: keys pass through it.
struct Lines<'a> {
    from: &'a UnixStream,
    buffer: Zeroizing<Vec<u8>>,
    /// What is read and not yet given out.
    filled: Range<usize>,
}

impl<'a> Lines<'a> {
    fn new(from: &'a UnixStream) -> Self {
        Self { from, buffer: Zeroizing::new(vec![0; MAX_LINE * 4]), filled: 0..0 }
    }

    fn next(&mut self) -> io::Result<Line<'_>> {
        let mut too_long = false;
        loop {
            if let Some(length) = self.buffer[self.filled.clone()].iter().position(|&b| b == b'\n') {
                let line = self.filled.start..self.filled.start + length;
                self.filled.start = line.end + 1;
                let fits = !too_long && length <= MAX_LINE;
                return Ok(if fits { Line::Text(&self.buffer[line]) } else { Line::TooLong });
            }
            if self.filled.len() > MAX_LINE {
                too_long = true;
                self.filled = 0..0;
            }
            self.buffer.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
            match self.from.read(&mut self.buffer[self.filled.end..]) {
                Ok(0) => return Ok(Line::End),
                Ok(count) => self.filled.end += count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

#[cfg(test)]
mod fake;
#[cfg(test)]
mod wg;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use super::fake::Fake;
    use super::*;

    struct Served {
        directory: tempfile::TempDir,
        fake: Arc<Fake>,
        removed: Arc<AtomicUsize>,
        server: Option<ControlServer>,
    }

    impl Served {
        fn new() -> Self {
            let directory = tempfile::tempdir().expect("a directory");
            let socket = ControlSocket::open(directory.path(), "wg0").expect("a socket");
            let (fake, removed) = (Arc::new(Fake::default()), Arc::new(AtomicUsize::new(0)));
            let seen = Arc::clone(&removed);
            let on_removed = move || {
                seen.fetch_add(1, Ordering::SeqCst);
            };
            let server = socket.serve(Arc::clone(&fake), on_removed).expect("a thread");
            Self { directory, fake, removed, server: Some(server) }
        }

        fn path(&self) -> PathBuf {
            path_in(self.directory.path(), "wg0")
        }

        fn connect(&self) -> UnixStream {
            let stream = UnixStream::connect(self.path()).expect("it listens");
            stream.set_read_timeout(Some(PATIENCE * 3)).expect("a timeout");
            stream
        }
    }

    fn ask(stream: &UnixStream, request: &str) -> String {
        let mut stream = stream;
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = Vec::new();
        while !answer.ends_with(b"\n\n") {
            let mut byte = [0];
            match stream.read(&mut byte).expect("an answer") {
                0 => break,
                _ => answer.push(byte[0]),
            }
        }
        String::from_utf8(answer).expect("text")
    }

    #[test]
    fn several_requests_on_one_connection_are_answered_in_turn() {
        let served = Served::new();
        let stream = served.connect();
        assert_eq!(ask(&stream, "set=1\nfwmark=7\n\n"), "errno=0\n\n");
        assert_eq!(ask(&stream, "get=1\n\n"), "listen_port=0\nfwmark=7\nerrno=0\n\n");
        assert_eq!(ask(&stream, "set=1\n\n"), "errno=0\n\n");
    }

    #[test]
    fn a_set_with_a_mistake_changes_nothing_and_the_connection_goes_on() {
        let served = Served::new();
        let stream = served.connect();
        let long = "x".repeat(3 * MAX_LINE);
        for (request, answer) in [
            ("set=1\nfwmark=7\nlisten_port=x\nfwmark=8\n\n".to_owned(), "errno=-22\n\n"),
            ("set=1\nfwmark=7\nno_equals_sign\n\n".to_owned(), "errno=-71\n\n"),
            (format!("set=1\nfwmark=7\n{long}\n\n"), "errno=-22\n\n"),
            ("set=1\nfwmark=7\nreplace_peers=false\n\n".to_owned(), "errno=-22\n\n"),
        ] {
            assert_eq!(ask(&stream, &request), answer);
        }
        assert_eq!(ask(&stream, "get=1\n\n"), "listen_port=0\nerrno=0\n\n");
    }

    #[test]
    fn what_the_tunnel_refuses_reaches_the_client_as_its_errno() {
        let served = Served::new();
        let busy = format!("set=1\nlisten_port={}\nfwmark=7\n\n", fake::BUSY_PORT);
        assert_eq!(ask(&served.connect(), &busy), "errno=-98\n\n");
        assert_eq!(ask(&served.connect(), "get=1\n\n"), "listen_port=0\nerrno=0\n\n");
        served.fake.end();
        assert_eq!(ask(&served.connect(), "get=1\n\n"), "errno=5\n\n");
        assert_eq!(ask(&served.connect(), "set=1\nfwmark=7\n\n"), "errno=-5\n\n");
    }

    #[test]
    fn the_request_of_doctor_is_answered_beside_the_others_and_refused_with_more_lines() {
        let served = Served::new();
        let stream = served.connect();
        assert_eq!(ask(&stream, "fv=1\n\n"), "fv=0\nerrno=0\n\n");
        assert_eq!(ask(&stream, "get=1\n\n"), "listen_port=0\nerrno=0\n\n");
        assert_eq!(ask(&stream, "fv=1\nfv=1\n\n"), "errno=22\n\n");
        served.fake.end();
        assert_eq!(ask(&stream, "fv=1\n\n"), "errno=5\n\n");
    }

    #[test]
    fn a_request_that_is_neither_get_nor_set_is_refused_and_ends_the_connection() {
        let served = Served::new();
        let stream = served.connect();
        assert_eq!(ask(&stream, "hello=1\n\n"), "errno=-22\n\n");
        assert_eq!((&stream).read(&mut [0]).expect("closed"), 0);
        assert_eq!(ask(&served.connect(), "get=1\nmore=1\n\n"), "errno=22\n\n");
    }

    #[test]
    fn a_request_that_is_cut_short_is_refused_and_changes_nothing() {
        let served = Served::new();
        let mut stream = served.connect();
        stream.write_all(b"set=1\nfwmark=7\n").expect("sent");
        stream.shutdown(std::net::Shutdown::Write).expect("half closed");
        assert_eq!(ask(&stream, ""), "errno=-71\n\n");
        assert_eq!(ask(&served.connect(), "get=1\n\n"), "listen_port=0\nerrno=0\n\n");
    }

    #[test]
    fn idle_and_closed_connections_do_not_keep_others_waiting() {
        let served = Served::new();
        drop(served.connect());
        let idle: Vec<_> = (0..MAX_CONNECTIONS * 2).map(|_| served.connect()).collect();
        let begun = Instant::now();
        assert_eq!(ask(&served.connect(), "get=1\n\n"), "listen_port=0\nerrno=0\n\n");
        assert!(begun.elapsed() < Duration::from_secs(1));
        drop(idle);
    }

    #[test]
    fn two_clients_at_once_are_never_refused() {
        let served = Served::new();
        thread::scope(|scope| {
            for mark in 1..=2 {
                let served = &served;
                scope.spawn(move || {
                    for _ in 0..500 {
                        let answer = ask(&served.connect(), &format!("set=1\nfwmark={mark}\n\n"));
                        assert_eq!(answer, "errno=0\n\n");
                    }
                });
            }
        });
    }

    #[test]
    fn only_the_owner_may_use_the_socket() {
        use std::os::unix::fs::PermissionsExt;
        let served = Served::new();
        let mode = fs::metadata(served.path()).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn the_file_goes_with_the_server_and_its_removal_is_told_once() {
        let mut served = Served::new();
        served.server = None;
        assert!(!served.path().exists());
        assert_eq!(served.removed.load(Ordering::SeqCst), 0);

        let served = Served::new();
        fs::remove_file(served.path()).expect("removed");
        thread::sleep(LOOK * 3);
        assert_eq!(served.removed.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_socket_listens_from_the_moment_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let is_final = |path: &Path| path.extension().is_some_and(|end| end == "sock");
        let stop = std::sync::atomic::AtomicBool::new(false);
        let made = thread::scope(|scope| {
            // What `wg show` does, all the time: a socket that refuses is taken for a stale one.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for entry in fs::read_dir(dir.path()).unwrap().flatten() {
                        let refused = UnixStream::connect(entry.path())
                            .is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused);
                        assert!(!refused || !is_final(&entry.path()), "a socket that does not listen");
                    }
                }
            });
            let open = |n| ControlSocket::open(dir.path(), &format!("wg{n}"));
            let made: Vec<_> = (0..300).map(open).collect();
            stop.store(true, Ordering::Relaxed);
            made
        });
        assert!(made.iter().all(Result::is_ok));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 300, "something else stays there");
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
        let served = Served::new();
        let error = ControlSocket::open(served.directory.path(), "wg0").expect_err("in use");
        assert!(error.ends_with("another process serves wg0 already"), "{error}");
        assert_eq!(ask(&served.connect(), "get=1\n\n"), "listen_port=0\nerrno=0\n\n");

        drop(UnixListener::bind(path_in(served.directory.path(), "wg1")).expect("bound"));
        let fresh = ControlSocket::open(served.directory.path(), "wg1").expect("replaced");
        assert!(is_served(&path_in(served.directory.path(), "wg1")));
        drop(fresh);

        fs::write(path_in(served.directory.path(), "wg2"), "a file").expect("written");
        let error = ControlSocket::open(served.directory.path(), "wg2").expect_err("not a socket");
        assert!(error.ends_with("remove it"), "{error}");
    }

    #[test]
    fn a_newer_socket_in_the_same_place_is_left_alone() {
        let mut served = Served::new();
        fs::remove_file(served.path()).expect("removed");
        let newer = UnixListener::bind(served.path()).expect("bound");
        served.server = None;
        assert!(served.path().exists());
        drop(newer);
    }

    #[test]
    fn an_inherited_socket_is_served_and_its_file_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = path_in(directory.path(), "wg0");
        let listener = UnixListener::bind(&path).expect("bound");
        let server =
            ControlSocket::inherited(listener).serve(Arc::new(Fake::default()), || {}).expect("a thread");
        assert_eq!(ask(&UnixStream::connect(&path).expect("it listens"), "set=1\n\n"), "errno=0\n\n");
        drop(server);
        assert!(!path.exists());
    }
}
