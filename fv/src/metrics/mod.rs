//! Counters for Prometheus over HTTP, when an address is given for it (`--metrics`). Started by `tunnel`.
//!
//! A scraper costs the datapath nothing: requests are served by threads of their own, at most eight, each for at most
//! five seconds, and however many ask, the datapath is asked at most once a second.

mod text;

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Connections served at once; one more ends the oldest.
const MAX_CONNECTIONS: usize = 8;
/// From the first byte to the last; Prometheus itself gives up after ten.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long an answer is given again.
const KEPT: Duration = Duration::from_secs(1);
/// More than this is no request of a scraper.
const MAX_REQUEST: usize = 8 << 10;
/// After a failed accept: out of descriptors, most likely.
const PAUSE: Duration = Duration::from_secs(1);

use nix::errno::Errno;

pub(crate) use text::{Numbers, render};

/// Listens on `address` and answers with what `render` gives, until the process ends. `render` gives `None` when the
/// tunnel has ended.
///
/// # Errors
/// One sentence that says what to do.
pub(crate) fn serve(
    address: SocketAddr,
    render: impl Fn() -> Option<String> + Send + Sync + 'static,
) -> Result<SocketAddr, String> {
    let failed = |e: io::Error| {
        let known = [
            (Errno::EADDRINUSE, "is in use by another program; choose another port"),
            (Errno::EADDRNOTAVAIL, "is no address of this host; 127.0.0.1 always is"),
            (Errno::EACCES, "may not be used; choose a port from 1024 on"),
        ];
        let why = known.into_iter().find(|(errno, _)| e.raw_os_error() == Some(*errno as i32));
        why.map_or_else(
            || format!("metrics: cannot listen on {address}: {e}"),
            |(_, why)| format!("metrics: {address} {why}"),
        )
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let server = Arc::new(Server { render, kept: Mutex::default(), connections: Mutex::default() });
    thread::Builder::new().name("metrics".into()).spawn(move || server.run(&listener)).map_err(failed)?;
    Ok(bound)
}

struct Server<R> {
    render: R,
    kept: Mutex<Option<(Instant, Arc<str>)>>,
    connections: Mutex<VecDeque<Arc<TcpStream>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<R: Fn() -> Option<String> + Send + Sync + 'static> Server<R> {
    fn run(self: &Arc<Self>, listener: &TcpListener) {
        loop {
            if listener.accept().and_then(|(stream, _)| self.start(stream)).is_err() {
                thread::sleep(PAUSE);
            }
        }
    }

    fn start(self: &Arc<Self>, stream: TcpStream) -> io::Result<()> {
        let stream = Arc::new(stream);
        let mut all = lock(&self.connections);
        if all.len() >= MAX_CONNECTIONS
            && let Some(oldest) = all.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        let (mine, server) = (Arc::clone(&stream), Arc::clone(self));
        thread::Builder::new().name("metrics-client".into()).spawn(move || {
            // Whoever goes away or is too slow has no answer, and is nothing to report.
            let _ = server.answer(&mine, Instant::now() + PATIENCE);
            lock(&server.connections).retain(|other| !Arc::ptr_eq(other, &mine));
        })?;
        all.push_back(stream);
        Ok(())
    }

    fn answer(&self, stream: &TcpStream, end: Instant) -> io::Result<()> {
        let request = read_request(stream, end)?;
        let (status, body, head_only) = match request.as_deref().map(path) {
            None => ("431 Request Header Fields Too Large", "the request is too long\n".into(), false),
            Some(None) => ("405 Method Not Allowed", "only GET is answered\n".into(), false),
            Some(Some((path, head))) if path == "/metrics" => match self.text() {
                Some(text) => ("200 OK", text, head),
                None => ("503 Service Unavailable", "the tunnel has ended\n".into(), head),
            },
            Some(Some((_, head))) => ("404 Not Found", "the counters are at /metrics\n".into(), head),
        };
        let length = body.len();
        let mut answer = format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
             Content-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        if !head_only {
            answer += &body;
        }
        write_until(stream, answer.as_bytes(), end)?;
        stream.shutdown(Shutdown::Write)
    }

    /// The counters, not older than a second.
    fn text(&self) -> Option<Arc<str>> {
        let mut kept = lock(&self.kept);
        if let Some((_, text)) = kept.as_ref().filter(|(when, _)| when.elapsed() < KEPT) {
            return Some(Arc::clone(text));
        }
        let text: Arc<str> = (self.render)()?.into();
        *kept = Some((Instant::now(), Arc::clone(&text)));
        Some(text)
    }
}

/// What is left until `end`; an error when nothing is.
fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// The head of a request; `None` when it is too long.
fn read_request(mut stream: &TcpStream, end: Instant) -> io::Result<Option<Vec<u8>>> {
    let (mut request, mut chunk) = (Vec::new(), [0; 1024]);
    loop {
        stream.set_read_timeout(Some(left(end)?))?;
        let read = stream.read(&mut chunk)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        request.extend_from_slice(chunk.get(..read).unwrap_or_default());
        if request.windows(4).any(|four| four == b"\r\n\r\n") || request.windows(2).any(|two| two == b"\n\n")
        {
            return Ok(Some(request));
        }
        if request.len() > MAX_REQUEST {
            return Ok(None);
        }
    }
}

fn write_until(mut stream: &TcpStream, mut bytes: &[u8], end: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(end)?))?;
        let written = stream.write(bytes)?;
        bytes = bytes.get(written..).unwrap_or_default();
    }
    Ok(())
}

/// What is asked for, without what follows a question mark, and whether only the head of the answer is wanted.
fn path(request: &[u8]) -> Option<(String, bool)> {
    let text = String::from_utf8_lossy(request);
    let mut words = text.lines().next()?.split(' ');
    let head = match words.next()? {
        "GET" => false,
        "HEAD" => true,
        _ => return None,
    };
    let path = words.next()?;
    Some((path.split_once('?').map_or(path, |(path, _)| path).to_owned(), head))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn started(text: &str) -> (SocketAddr, Arc<AtomicUsize>) {
        let (count, text) = (Arc::new(AtomicUsize::new(0)), text.to_owned());
        let counted = Arc::clone(&count);
        let render = move || {
            counted.fetch_add(1, Ordering::SeqCst);
            Some(text.clone())
        };
        (serve("127.0.0.1:0".parse().expect("an address"), render).expect("served"), count)
    }

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }

    #[test]
    fn a_scrape_is_answered_and_all_else_is_told_what_to_ask() {
        let (address, _) = started("fv_up 1\n");
        let answer = ask(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nfv_up 1\n"),
            "{answer}"
        );
        assert!(answer.contains("Content-Type: text/plain; version=0.0.4"), "{answer}");
        let head = ask(address, "HEAD /metrics?x=1 HTTP/1.0\r\n\r\n");
        assert!(head.contains("Content-Length: 8\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        assert!(ask(address, "GET / HTTP/1.1\r\n\r\n").contains("404 Not Found"));
        assert!(ask(address, "POST /metrics HTTP/1.1\r\n\r\n").contains("405 Method Not Allowed"));
        assert!(ask(address, &"x".repeat(MAX_REQUEST + 1)).contains("431 "));
    }

    #[test]
    fn however_many_ask_the_datapath_is_asked_once_a_second() {
        let (address, count) = started("fv_up 1\n");
        let began = Instant::now();
        for _ in 0..20 {
            assert!(ask(address, "GET /metrics HTTP/1.1\r\n\r\n").contains("200 OK"));
        }
        let most = 1 + began.elapsed().as_secs() as usize;
        let asked = count.load(Ordering::SeqCst);
        assert!((1..=most).contains(&asked), "{asked} of {most}");
    }

    #[test]
    fn those_who_say_nothing_or_never_read_do_not_keep_others_from_their_answer() {
        // An answer that fills every buffer on the way, so that its reader can stop it.
        let (address, _) = started(&"x".repeat(32 << 20));
        let mut hostile = Vec::new();
        for n in 0..2 * MAX_CONNECTIONS {
            let mut stream = TcpStream::connect(address).expect("connected");
            if n % 2 == 0 {
                stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("sent");
            }
            hostile.push(stream);
        }
        let answer = ask(address, "GET /metrics HTTP/1.1\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.len() > 32 << 20, "{}", answer.len());
        // The first one was ended by those that came later.
        let first = hostile.first_mut().expect("there");
        first.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        let mut got = Vec::new();
        let _ = first.read_to_end(&mut got);
        assert!(got.len() < 32 << 20, "{}", got.len());
    }

    #[test]
    fn an_address_that_cannot_be_had_is_named_with_what_to_do() {
        let (address, _) = started("");
        let error = serve(address, || None).expect_err("taken");
        assert!(error.contains(&address.to_string()) && error.contains("choose another port"), "{error}");
        let error = serve("192.0.2.1:9586".parse().expect("an address"), || None).expect_err("not ours");
        assert!(error.contains("no address of this host"), "{error}");
    }
}
